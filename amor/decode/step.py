"""One decode step from packed weights: the same numbers as the model's forward with T = 1, at the speed of memory.

The head is read once for all probes of a token: block k's input and the final one are known in advance as long as no
block fires. After a firing the later ones of the rows that fired are read again, also in one pass. Because a product
gives a row the same bits whatever its neighbours are, this changes no decision.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from amor.decode import kernels
from amor.decode.layers import Norm, PackedAttention, PackedLayer, PackedMLP, matrices
from amor.errors import AmorError
from amor.gates.base import Evidence
from amor.layout import Layout
from amor.models.amor import Amor
from amor.models.block import Block, Trace
from amor.ops import native
from amor.ops.product import pack, probe
from amor.state import Part, State


@dataclass(frozen=True)
class Seen:
    """What one step found."""

    hidden: Tensor  # [R, D] ready for the head
    logits: Tensor  # [R, V]
    entropy: Tensor  # [R] of the next token, in nats
    state: State
    gates: tuple[Trace, ...]  # [R, 1] each
    head_rows: int  # rows the head was asked for
    head_passes: int  # times the head's weights were read


class PackedBlock:
    def __init__(self, block: Block, kind: str):
        self.gate, self.needs = block.gate, block.gate.needs
        self.norm = None if block.norm is None else Norm(block.norm)
        self.attention = PackedAttention(block.attention, kind)
        self.alpha = block.alpha.detach().float().sigmoid()
        self.mlp = None
        if block.mlp is not None and block.mlp_norm is not None:
            self.mlp = Norm(block.mlp_norm), PackedMLP(block.mlp, kind)

    def update(self, h: Tensor, a: Tensor) -> Tensor:
        h = h + self.alpha * a
        if self.mlp is not None:
            norm, mlp = self.mlp
            mlp.add(norm(h), h)
        return h


class Packed:
    """A model whose matrices are packed once, in float32 (shared with the model) or 8 bits."""

    def __init__(self, model: Amor, weights: str = "float32"):
        why = native.missing(kernels.SOURCE)
        if why is not None:
            raise AmorError(f"packed decode needs native code: {why}; the model's own forward decodes without it")
        if model.embed.weight.device.type != "cpu":
            raise AmorError(f"packed decode runs on cpu, the model is on {model.embed.weight.device.type}; use its own forward")
        self.config, self.embed, self.kind = model.config, model.embed.weight.detach(), weights
        self.head = pack(model.embed.weight, weights)
        self.layers = [PackedLayer(layer, weights) for layer in model.backbone.layers]  # type: ignore[arg-type]
        self.norm_f = Norm(model.norm_f)
        self.blocks = [PackedBlock(block, weights) for block in model.blocks]  # type: ignore[arg-type]
        self.final_norm = None if model.final_norm is None else Norm(model.final_norm)
        self.prenorm = model.config.blocks.first == "prenorm"

    @property
    def nbytes(self) -> int:
        """Bytes of matrices one step reads, the head once; every block as if it fired."""
        parts: list[object] = [*self.layers, *self.blocks]
        for block in self.blocks:
            parts += [block.attention, *([] if block.mlp is None else [block.mlp[1]])]
        return self.head.nbytes + sum(m.nbytes for part in parts for m in matrices(part))

    @torch.no_grad()
    def step(self, tokens: Tensor, state: State) -> Seen:
        """Read one token a row, [R]. The state handed in is written over, unless it remembers tokens for rollback."""
        layout = state.layout(1, None, None)
        parts = [_apart(part) for part in state.parts] if state.memory else list(state.parts)
        h = self.embed[tokens].float()
        after: list[Part] = []
        for layer, part in zip(self.layers, parts, strict=False):
            h, part = layer(h, part, layout)
            after.append(part)
        if not self.prenorm or not self.blocks:
            h = self.norm_f(h)
        walk = _Walk(self, h, layout)
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
    """The way of one step through the blocks, with what the head has already said of the inputs to come."""

    def __init__(self, packed: Packed, h: Tensor, layout: Layout):
        self.packed, self.h, self.layout = packed, h, layout
        self.rows = self.passes = 0
        self.traces: list[Trace] = []
        count, vocab = len(packed.blocks) + 1, packed.head.outputs
        self.x = torch.empty(count, *h.shape)
        self.entropy, self.margin = torch.empty(count, len(h)), torch.empty(count, len(h))
        self.logits = torch.empty(len(h), vocab)
        self.look(torch.arange(len(h)), 0)

    def look(self, rows: Tensor, start: int) -> None:
        """Ask the head, in one pass, for every input from block `start` on of some rows, as if nothing more fired."""
        inputs = torch.stack(self.packed.inputs(self.h[rows], start))  # [count, n, D]
        found = probe(inputs.flatten(0, 1), self.packed.head, logits=True)
        assert found.logits is not None
        self.x[start:, rows] = inputs
        self.entropy[start:, rows] = found.entropy.view(inputs.shape[:2])
        self.margin[start:, rows] = found.margin.view(inputs.shape[:2])
        self.logits[rows] = found.logits[-len(rows) :]
        self.rows += inputs.shape[0] * len(rows)
        self.passes += -(-inputs.shape[0] * len(rows) // 8)

    def through(self, index: int, part: Part) -> Part:
        """Block `index`: keys and values always, the rest only for rows that fire."""
        block, x = self.packed.blocks[index], self.x[index]
        kv = block.attention.remember(x, part, self.layout)
        fire, score = self.decide(block, x, index)
        self.traces.append(Trace(score[:, None], fire[:, None], block.gate.threshold))
        rows = fire.nonzero()[:, 0]
        if len(rows):
            self.h = self.h.index_put((rows,), block.update(self.h[rows], block.attention.ask(x[rows], kv, self.layout, rows)))
            self.look(rows, index + 1)
        return {"kv": kv}

    def decide(self, block: PackedBlock, x: Tensor, index: int) -> tuple[Tensor, Tensor]:
        if "gain" in block.needs:
            raise AmorError("the oracle gate needs the true next tokens, which a decode step does not know; use another gate")
        vocab = math.log(self.packed.head.outputs)
        verdict = block.gate(Evidence(x, self.layout.start, self.entropy[index] / vocab, self.margin[index]))
        return verdict.fire, verdict.score

    def seen(self, state: State) -> Seen:
        return Seen(self.x[-1], self.logits, self.entropy[-1], state, tuple(self.traces), self.rows, self.passes)


def _apart(part: Part) -> Part:
    return {name: held.clone() if isinstance(held, Tensor) else held for name, held in part.items()}
