"""One decode step from packed weights: the same numbers as the model's forward with T = 1, at the speed of memory.

What the head says comes from amor/decode/probe.py. Because a product gives a row the same bits whatever its neighbours
are, reading it for several blocks at once changes no decision.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from amor.decode import kernels
from amor.decode.layers import Norm, PackedAttention, PackedLayer, PackedMLP, matrices, stretches
from amor.decode.probe import Head, Probes
from amor.decode.savings import Savings
from amor.errors import AmorError
from amor.gates.base import Gate
from amor.layout import Layout
from amor.models.amor import Amor
from amor.models.block import Block, Trace
from amor.ops import native
from amor.ops.product import Matrix
from amor.ops.product.pages import settle
from amor.state import KV, Part, State


@dataclass(frozen=True)
class Seen:
    """What one step found."""

    hidden: Tensor  # [R, D] ready for the head
    logits: Tensor  # [R, V], or [R, 0] where only the best token was wanted
    entropy: Tensor  # [R] of the next token, in nats
    state: State
    gates: tuple[Trace, ...]  # [R, 1] each
    head_rows: int  # rows the exact head was asked for
    head_passes: int  # times its weights were read
    best: Tensor | None = None  # [R] the best next token, where it was found without the logits


class PackedBlock:
    def __init__(self, block: Block, kind: str):
        self.own = block
        self.norm = None if block.norm is None else Norm(block.norm)
        self.attention = PackedAttention(block.attention, kind)
        self.alpha = block.alpha.detach().float().sigmoid()
        self.mlp = None
        if block.mlp is not None and block.mlp_norm is not None:
            self.mlp = Norm(block.mlp_norm), PackedMLP(block.mlp, kind)

    @property
    def gate(self) -> Gate:
        """The gate the model's block has now: it may be aimed or exchanged between steps."""
        return self.own.gate

    def update(self, h: Tensor, a: Tensor) -> Tensor:
        h = h + self.alpha * a
        if self.mlp is not None:
            norm, mlp = self.mlp
            mlp.add(norm(h), h)
        return h


class Packed:
    """A model whose matrices are packed once, in float32 (shared with the model) or 8 bits."""

    def __init__(self, model: Amor, weights: str = "float32", savings: Savings | None = None):
        why = native.missing(kernels.SOURCE)
        if why is not None:
            raise AmorError(f"packed decode needs native code: {why}; the model's own forward decodes without it")
        if model.embed.weight.device.type != "cpu":
            raise AmorError(f"packed decode runs on cpu, the model is on {model.embed.weight.device.type}; use its own forward")
        self.config, self.embed, self.kind = model.config, model.embed.weight.detach(), weights
        self.savings = savings or Savings()
        self.head = Head(model.embed.weight, weights, self.savings.cheap)
        self.layers = [PackedLayer(layer, weights) for layer in model.backbone.layers]  # type: ignore[arg-type]
        self.stretches = stretches(self.layers)
        self.norm_f = Norm(model.norm_f)
        self.blocks = [PackedBlock(block, weights) for block in model.blocks]  # type: ignore[arg-type]
        self.final_norm = None if model.final_norm is None else Norm(model.final_norm)
        self.prenorm = model.config.blocks.first == "prenorm"
        settle(t for m in self.matrices() for t in (m.weight, m.scales) if t is not None)

    def matrices(self) -> list[Matrix]:
        """Every matrix of layers and blocks."""
        return [m for part in (*self.layers, *self.blocks) for m in matrices(part)]

    @property
    def nbytes(self) -> int:
        """Bytes of matrices one step reads, the head once; every block as if it fired."""
        return self.head.matrix.nbytes + sum(m.nbytes for m in self.matrices())

    @torch.no_grad()
    def step(self, tokens: Tensor, state: State, best: bool = False) -> Seen:
        """Read one token a row, [R]. The state handed in is written over, unless it remembers tokens for rollback.

        best: the next token's logits are not wanted, only which is the largest.
        """
        layout = state.layout(1, None, None)
        parts = [_apart(part) for part in state.parts] if state.memory else list(state.parts)
        h = self.embed[tokens].float()
        after: list[Part] = []
        for stretch in self.stretches:
            h, held = stretch(h, parts[len(after) : len(after) + len(stretch.layers)], layout)
            after += held
        if not self.prenorm or not self.blocks:
            h = self.norm_f(h)
        walk = _Walk(self, h, layout, best)
        for index, part in enumerate(parts[len(self.layers) :]):
            after.append(walk.through(index, part))
        return walk.seen(state.advance(layout, after, tokens[:, None]))

    def inputs(self, h: Tensor, start: int) -> list[Tensor]:
        """What the head is asked if no block from `start` on fires: their inputs, then the final hidden vector."""
        found = [self.block_input(k, h) for k in range(start, len(self.blocks))]
        return [*found, h if self.final_norm is None else self.final_norm(h)]

    def block_input(self, index: int, h: Tensor) -> Tensor:
        norm = self.blocks[index].norm
        if norm is not None:
            return norm(h)
        return self.norm_f(h) if self.prenorm else h


class _Walk:
    """The way of one step through the blocks."""

    def __init__(self, packed: Packed, h: Tensor, layout: Layout, best: bool):
        self.packed, self.h, self.layout = packed, h, layout
        self.probes = Probes(packed.head, [b.gate for b in packed.blocks], packed.inputs, packed.savings, best=best)
        self.before = replace(packed.head.passes)
        self.traces: list[Trace] = []

    def through(self, index: int, part: Part) -> Part:
        """Block `index`: keys and values always, the rest only for rows that fire."""
        block, x = self.packed.blocks[index], self.packed.block_input(index, self.h)
        kv = block.attention.remember(x, part, self.layout)
        verdict = block.gate(self.probes.ask(index, self.h, x, self.layout.start))
        self.traces.append(Trace(verdict.score[:, None], verdict.fire[:, None], block.gate.threshold))
        rows = verdict.fire.nonzero()[:, 0]
        if self.packed.savings.sparse:
            if len(rows):
                self.h = self.h.index_put((rows,), self.opened(block, x, kv, rows))
        else:
            opened = self.opened(block, x, kv, torch.arange(len(x)))
            self.h = torch.where(verdict.fire[:, None], opened, self.h)
        return {"kv": kv}

    def opened(self, block: PackedBlock, x: Tensor, kv: KV, rows: Tensor) -> Tensor:
        """The residual of some rows, fired."""
        return block.update(self.h[rows], block.attention.ask(x[rows], kv, self.layout, rows))

    def seen(self, state: State) -> Seen:
        final_norm, passes = self.packed.final_norm, self.packed.head.passes
        hidden = self.h if final_norm is None else final_norm(self.h)
        logits, best, entropy = self.probes.output(hidden)
        self.packed.head.expect(sum(float(t.fire.sum()) for t in self.traces) / len(hidden), self.probes.doubts / len(hidden))
        rows, read = passes.rows - self.before.rows, passes.exact - self.before.exact
        return Seen(hidden, logits, entropy, state, tuple(self.traces), rows, read, best)


def _apart(part: Part) -> Part:
    return {name: held.clone() if isinstance(held, Tensor) else held for name, held in part.items()}
