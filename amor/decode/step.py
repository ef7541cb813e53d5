"""One decode step from packed weights: the same numbers as the model's forward with T = 1, at the speed of memory.

What the head says comes from amor/decode/probe.py. Because a product gives a row the same bits whatever its neighbours
are, reading it for several blocks at once changes no decision.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from amor.decode import kernels
from amor.decode.head import Head
from amor.decode.layers import Norm, PackedAttention, PackedLayer, PackedMLP, matrices, stretches
from amor.decode.probe import Probes
from amor.decode.savings import Savings
from amor.errors import AmorError
from amor.gates.base import Gate
from amor.layout import Layout
from amor.models.amor import Amor
from amor.models.block import Block
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
    fire: Tensor  # [R, K] whether each block fired
    score: Tensor  # [R, K] what its gate looked at
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
        first = self.norm_f if self.prenorm else None
        self.norms = [*(block.norm or first for block in self.blocks), self.final_norm]  # of a block's input, and the output's
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
        kept = [b.attention.opened(part, layout) for b, part in zip(self.blocks, parts[len(self.layers) :], strict=True)]
        walk = _Walk(self, h, layout, kept, best)
        for index in range(len(self.blocks)):
            walk.through(index)
        for kv in kept:
            after.append({"kv": kv})
        return walk.seen(state.advance(layout, after, tokens[:, None]))

    def inputs(self, h: Tensor, columns: list[int]) -> Tensor:
        """What the head is asked of h [n, D] if no more block fires: blocks' inputs, in the last column the output's vector."""
        norms = (self.norms[column] for column in columns)
        return kernels.norms(h, [None if norm is None else (norm.weight, norm.eps) for norm in norms])


class _Walk:
    """The way of one step through the blocks.

    What blocks read is known ahead as long as none fires. So keys and values, which no gate decides on, wait until one fires or
    all are passed, and are then computed for several blocks in one call.
    """

    def __init__(self, packed: Packed, h: Tensor, layout: Layout, kept: list[KV], best: bool):
        self.packed, self.layout, self.kept, self.blocks = packed, layout, kept, packed.blocks
        self.probes = Probes(packed.head, [b.gate for b in self.blocks], self.inputs, packed.savings, best=best)
        self.before = replace(packed.head.passes)
        self.fires: list[list[bool]] = []  # block by block, of every row
        self.scores: list[list[float]] = []
        self.remembered = 0  # blocks whose keys and values are written
        self.foreseen: dict[int, Tensor] = {}  # the residual after a block if all rows fire there, and in those before it
        self.move(h, 0)

    def move(self, h: Tensor, start: int) -> None:
        """From here on the residual is h [R, D], and what blocks from `start` on and the output read is known with it."""
        self.h, self.start = h, start
        self.ahead = self.packed.inputs(h, list(range(start, len(self.blocks) + 1)))

    def inputs(self, h: Tensor, columns: list[int]) -> Tensor:
        """What the head is asked of h, the residual of this walk or some of its rows."""
        if h is not self.h:
            return self.packed.inputs(h, columns)
        from_, to = columns[0] - self.start, columns[-1] + 1 - self.start
        return self.ahead[from_:to] if to - from_ == len(columns) else self.ahead[[c - self.start for c in columns]]

    def through(self, index: int) -> None:
        """Block `index`: queries, attention and what follows only for rows that fire."""
        x = self.ahead[index - self.start]
        fires, scores = self.probes.decide(index, self.h, x, self.layout.start)
        self.fires.append(fires)
        self.scores.append(scores)
        foreseen = self.foreseen.pop(index, None)
        if foreseen is not None and not all(fires):  # then what blocks to come read is not what was foreseen
            self.foreseen, self.remembered, foreseen = {}, index + 1, None
        if not any(fires) and self.packed.savings.sparse:
            return
        self.remember(index + 1)
        if all(fires):
            moved = self.opened(index, self.h, x, None) if foreseen is None else foreseen
        elif self.packed.savings.sparse:
            rows = torch.tensor(fires).nonzero()[:, 0]
            moved = self.h.index_put((rows,), self.opened(index, self.h[rows], x[rows], rows))
        else:
            moved = torch.where(torch.tensor(fires)[:, None], self.opened(index, self.h, x, None), self.h)
        self.move(moved, index + 1)
        if all(fires) and foreseen is None and self.probes.foresees(index + 1, len(x)):
            self.foresee()

    def foresee(self) -> None:
        """Run the blocks to come as if all rows fired, and ask the head once about all of them and the output."""
        h, start, vectors = self.h, self.start, []
        for index in range(start, len(self.blocks)):
            self.remember(index + 1)
            vectors.append(self.ahead[0])
            self.foreseen[index] = self.opened(index, self.h, vectors[-1], None)
            self.move(self.foreseen[index], index + 1)
        vectors.append(self.ahead[0])
        self.move(h, start)
        self.probes.foretell(start, torch.stack(vectors))

    def remember(self, to: int) -> None:
        """Keys and values of blocks up to `to`; the residual has not moved since the last ones."""
        slots = []
        for index in range(self.remembered, to):
            attention = self.blocks[index].attention
            attention.spend(len(self.h))
            slots.append(attention.slots(self.ahead[index - self.start], self.kept[index], self.layout))
        if slots:
            kernels.remember(slots)
        self.remembered = max(self.remembered, to)

    def opened(self, index: int, h: Tensor, x: Tensor, rows: Tensor | None) -> Tensor:
        """The residual h of some rows or of all, fired."""
        block = self.blocks[index]
        return block.update(h, block.attention.ask(x, self.kept[index], self.layout, rows))

    def seen(self, state: State) -> Seen:
        self.remember(len(self.blocks))
        hidden, passes = self.ahead[-1], self.packed.head.passes
        logits, best, entropy = self.probes.output(hidden)
        self.packed.head.expect(self.fires, len(hidden), self.probes.doubts)
        shape = len(self.fires), len(hidden)
        fire, score = torch.tensor(self.fires, dtype=torch.bool).view(shape), torch.tensor(self.scores).view(shape)
        rows, read = passes.rows - self.before.rows, passes.exact - self.before.exact
        return Seen(hidden, logits, entropy, state, fire.T, score.T, rows, read, best)


def _apart(part: Part) -> Part:
    return {name: held.clone() if isinstance(held, Tensor) else held for name, held in part.items()}
