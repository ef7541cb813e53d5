"""One decode step by compiled programs: the same numbers as the model's forward with T = 1, at the speed of memory.

Layers that follow each other and state their programs are one call of native code (a stretch); a layer that cannot be compiled
runs its own forward between two stretches. So do the blocks, all together, where one of them cannot.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from amor.decode.compile import SOURCE, Compiled
from amor.decode.policy import Policy
from amor.decode.reader import HeadReader
from amor.errors import AmorError
from amor.layout import Layout
from amor.models.amor import Amor
from amor.models.backbone import Layer
from amor.ops import native
from amor.ops.product import Matrix, pack
from amor.ops.product.pages import use_huge_pages
from amor.parts import touched
from amor.program import Program, UnsaidError, plainly
from amor.state import KV, Part, State


def uncompiled(model: Amor) -> str:
    """Why no step of a model can be compiled here, or nothing."""
    weight = model.embed.weight
    if weight.device.type != "cpu" or weight.dtype != torch.float32:
        return f"compiled steps are for float32 on cpu, the model is {weight.dtype} on {weight.device.type}"
    return native.missing(SOURCE) or ""


@dataclass(frozen=True)
class Stretch:
    """Layers that run as one: compiled, or one layer by its own forward, and why."""

    first: int
    layers: list[Layer]
    compiled: Compiled | None = None
    why: str = ""
    normed: bool = False  # norm_f is its last instruction

    def __call__(self, h: Tensor, parts: list[Part], layout: Layout) -> Tensor:
        """h [R, D] through the layers; `parts`, of all layers, become what they are after the token."""
        if self.compiled is not None:
            self.compiled([h], parts, layout)
            return h
        (layer,) = self.layers
        moved, parts[self.first] = layer(h[:, None], parts[self.first], layout)
        return moved[:, 0].contiguous()


@dataclass(frozen=True)
class Blocks:
    """The K blocks and the norms around them, compiled."""

    norm_f: Compiled | None  # of the residual, in place; None where it is block 0's pre-norm
    inputs: list[Compiled]  # by first column: what blocks from there on and the output read of the residual
    keys: Compiled  # of all blocks, one after the other
    key_steps: list[int]  # how many of its instructions belong to the first 0, 1, ... blocks
    fired: list[Compiled]

    def each(self) -> list[Compiled]:
        return [*([self.norm_f] if self.norm_f else []), *self.inputs, self.keys, *self.fired]


class CompiledModel:
    """A model whose steps are compiled as far as its layers allow."""

    def __init__(self, model: Amor, weights: str = "float32"):
        why = uncompiled(model)
        if why:
            raise AmorError(f"steps cannot be compiled: {why}; the model's own forward decodes without that")
        self.model, self.weights = model, weights
        self.pack = partial(pack, name=weights)
        self.blocks, self.blocks_why = self._blocks()
        self.stretches = self._stretches()
        use_huge_pages(t for m in self.matrices() for t in (m.weight, m.scales) if t is not None)

    def _stretches(self) -> list[Stretch]:
        said: list[tuple[int, Layer, str]] = []
        for index, layer in enumerate(self.model.backbone.layers):
            assert isinstance(layer, Layer)
            said.append((index, layer, self._unsaid(layer, index)))
        found: list[Stretch] = []
        waiting: list[Layer] = []
        for index, layer, why in said:
            if not why:
                waiting.append(layer)
            if waiting and (why or index == len(said) - 1):
                found.append(self._compile(index + (not why) - len(waiting), waiting, index == len(said) - 1 and not why))
                waiting = []
            if why:
                found.append(Stretch(index, [layer], None, why))
        return found

    def _unsaid(self, layer: Layer, index: int) -> str:
        if touched(layer) or touched(self.model.backbone):
            return touched(layer) or touched(self.model.backbone)
        try:
            layer.program(Program(self.model.config.width), Program(self.model.config.width).given[0])
        except UnsaidError as why:
            return str(why)
        return ""

    def _compile(self, first: int, layers: list[Layer], last: bool) -> Stretch:
        program = Program(self.model.config.width)
        for index, layer in enumerate(layers):
            program.layer(first + index)
            layer.program(program, program.given[0])
        ends = last and self.blocks is not None and self.blocks.norm_f is not None
        if ends:  # the norm behind the layers needs no call of its own
            program.norm(program.given[0], self.model.norm_f, out=program.given[0])
        return Stretch(first, list(layers), Compiled(program, self.pack), normed=ends)

    def _blocks(self) -> tuple[Blocks | None, str]:
        model, width = self.model, self.model.config.width
        blocks = model.each_block()
        prenorm = model.config.blocks.first == "prenorm" and bool(blocks)
        try:
            for block in blocks:
                for part in block.modules():
                    if touched(part) and part is not block.gate:
                        raise UnsaidError(touched(part))
            norm_f = None
            plainly(model.norm_f)
            if not prenorm:
                p = Program(width)
                p.norm(p.given[0], model.norm_f, out=p.given[0])
                norm_f = Compiled(p, self.pack)
            norms = [*(block.norm or (model.norm_f if prenorm else None) for block in blocks), model.final_norm]
            inputs = []
            for first in range(len(norms)):
                p = Program(width, *([width] * (len(norms) - first)))
                for norm, out in zip(norms[first:], p.given[1:], strict=True):
                    if norm is not None:
                        p.norm(p.given[0], norm, out=out)
                inputs.append(Compiled(p, self.pack))
            self.normed = [norm is not None for norm in norms]
            keys, ends, fired = Program(*([width] * len(blocks))), [0], []
            for index, block in enumerate(blocks):
                keys.layer(index)
                block.keys_program(keys, keys.given[index])
                ends.append(len(keys.steps))
                p = Program(width, width)
                block.program(p, *p.given)
                fired.append(Compiled(p, self.pack))
        except UnsaidError as why:
            return None, str(why)
        return Blocks(norm_f, inputs, Compiled(keys, self.pack), ends, fired), ""

    @property
    def path(self) -> str:
        """Which parts are compiled, and why others are not."""
        apart = [f"layer {s.first} by its own forward ({s.why})" for s in self.stretches if s.compiled is None]
        if self.blocks is None:
            apart.append(f"what follows the layers by the model's forward ({self.blocks_why})")
        return ", ".join(["compiled steps", *apart])

    @property
    def whole(self) -> bool:
        return self.blocks is not None and all(s.compiled is not None for s in self.stretches)

    def matrices(self) -> list[Matrix]:
        """Every matrix of layers and blocks."""
        compiled = [s.compiled for s in self.stretches if s.compiled is not None]
        return [m for one in (*compiled, *(self.blocks.each() if self.blocks else [])) for m in one.matrices]

    @property
    def nbytes(self) -> int:
        """Bytes of matrices one step reads without the head; every block as if it fired."""
        return sum(m.nbytes for m in self.matrices())

    def through_layers(self, tokens: Tensor, state: State, layout: Layout) -> tuple[Tensor, list[Part]]:
        """The residual [R, D] behind the layers (and norm_f, where blocks are compiled), and their parts of the state after it.

        Recurrent tensors of the state are written over, unless it remembers tokens for rollback.
        """
        depth = len(self.model.backbone.layers)
        parts = [
            {name: self._mine(held, layout, bool(state.memory)) for name, held in part.items()} if self._writes(layer) else part
            for layer, part in enumerate(state.parts[:depth])
        ]
        h = self.model.embed(tokens).contiguous()
        for stretch in self.stretches:
            h = stretch(h, parts, layout)
        if self.blocks is not None and self.blocks.norm_f is not None and not self.stretches[-1].normed:
            self.blocks.norm_f([h])
        return h, parts

    def _writes(self, layer: int) -> bool:
        """Whether compiled code writes a layer's part of the state; a layer's own forward gives a new one."""
        return any(s.compiled is not None and s.first <= layer < s.first + len(s.layers) for s in self.stretches)

    def _mine(self, held: Tensor | KV, layout: Layout, keep: bool) -> Tensor | KV:
        """What compiled code may write to: keys and values with a free slot, a recurrent tensor or (keep) a copy of it."""
        if isinstance(held, KV):
            return held.with_open_slots(layout)
        dense = held.float().contiguous()
        return dense.clone() if keep and dense is held else dense

    @property
    def overwrites(self) -> bool:
        return any(not held.theta for s in self.stretches if s.compiled is not None for held in s.compiled.held)


class BlockPass:
    """The way of one token through the blocks.

    What blocks read is known ahead as long as none fires. So keys and values, which no gate decides on, wait until one fires or
    all are passed.

    Foresight: blocks of trained models fire together. After all rows fired at one block, and where the policy expects it, the
    blocks to come are run as if all rows fired there too: keys are written and the residual moves on, block after block; then
    one pass over the head reads the inputs of all of them and the output's vector. The gates then decide from these readings,
    one after the other. While they fire, what was run ahead stands. At the first that does not, the residual goes back to the
    one before it, and what was run ahead is forgotten: keys of later blocks are written again, into the same slots (a slot is a
    position), and no query can have met them in between, so no trace is left.
    """

    def __init__(self, blocks: Blocks, normed: list[bool], h: Tensor, layout: Layout, parts: list[Part], reader: HeadReader):
        self.blocks, self.normed, self.layout, self.parts, self.reader = blocks, normed, layout, parts, reader
        self.count = len(parts)
        self.fires: list[list[bool]] = []  # block by block, of every row
        self.scores: list[list[float]] = []
        self.written = 0  # blocks whose keys and values are written
        self.ahead: dict[int, Tensor] = {}  # the residual after a block if all rows fire there, and at those run ahead before it
        if parts:
            self.move(h, 0)

    def move(self, h: Tensor, start: int) -> None:
        """From here on the residual is h [R, D], and what blocks from `start` on and the output read is known with it."""
        self.h, self.start, self.inputs = h, start, self.read_of(h, start)

    def read_of(self, h: Tensor, start: int) -> Tensor:
        """[columns, R, D] what is read of a residual by columns from `start` on, if no more block fires."""
        out = torch.empty(self.count + 1 - start, *h.shape)
        if not self.normed[start]:
            out[0] = h
        self.blocks.inputs[start]([h, *out])
        return out

    def some_inputs(self, h: Tensor, columns: list[int]) -> Tensor:
        """What the head is asked of h, the present residual or some of its rows."""
        first = self.start if h is self.h else columns[0]
        ahead = self.inputs if h is self.h else self.read_of(h, first)
        places = [c - first for c in columns]
        return ahead[places[0] : places[-1] + 1] if places[-1] + 1 - places[0] == len(places) else ahead[places]

    def run(self, sparse: bool, policy: Policy) -> Tensor:
        """Through all blocks; the output's vectors [R, D]."""
        for index in range(self.count):
            self.through(index, sparse, policy)
        self.write_keys(self.count)
        policy.observe(self.fires)
        return self.inputs[-1]

    def through(self, index: int, sparse: bool, policy: Policy) -> None:
        """Block `index`: queries, attention and what follows only for rows that fire."""
        x = self.inputs[index - self.start]
        fires, scores = self.reader.decide(index, self.h, x, self.layout.start)
        self.fires.append(fires)
        self.scores.append(scores)
        foreseen = self.ahead.pop(index, None)
        if foreseen is not None and not all(fires):  # then what later blocks read is not what was run ahead
            self.ahead, self.written, foreseen = {}, index + 1, None
        if not any(fires) and sparse:
            return
        self.write_keys(index + 1)
        if foreseen is not None:
            self.move(foreseen, index + 1)
            return
        if all(fires):
            moved = self.fire(index, self.h, x)
        elif sparse:
            rows = torch.tensor(fires).nonzero()[:, 0]
            moved = self.h.index_put((rows,), self.fire(index, self.h[rows], x[rows], rows))
        else:
            moved = torch.where(torch.tensor(fires)[:, None], self.fire(index, self.h, x), self.h)
        self.move(moved, index + 1)
        if all(fires) and self.worth_foreseeing(index + 1) and policy.foresees():
            self.foresee()

    def worth_foreseeing(self, first: int) -> bool:
        """Whether one pass over the head can serve all columns from `first` on, and more than the output's."""
        coming = self.count + 1 - first
        every = self.reader.asked[-coming:] == list(range(first, self.count + 1))
        return self.reader.joint and every and coming >= 2 and coming * len(self.h) <= self.reader.most

    def foresee(self) -> None:
        """Run the blocks to come as if all rows fired, and ask the head once about all of them and the output."""
        h, start, vectors = self.h, self.start, []
        for index in range(start, self.count):
            self.write_keys(index + 1)
            vectors.append(self.inputs[0])
            self.ahead[index] = self.fire(index, self.h, vectors[-1])
            self.move(self.ahead[index], index + 1)
        vectors.append(self.inputs[0])
        self.move(h, start)
        self.reader.foretell(start, torch.stack(vectors))

    def write_keys(self, to: int) -> None:
        """Keys and values of blocks up to `to`, in one call; the residual has not moved since the last ones."""
        if to > self.written:
            ends, known = self.blocks.key_steps, range(self.written, to)
            read = [self.inputs[k - self.start] if k in known else self.h for k in range(self.count)]
            self.blocks.keys(read, self.parts, self.layout, steps=(ends[self.written], ends[to]))
        self.written = max(self.written, to)

    def fire(self, index: int, h: Tensor, x: Tensor, rows: Tensor | None = None) -> Tensor:
        """The residual h of some rows or of all, fired."""
        moved = h.clone()
        self.blocks.fired[index]([moved, x.contiguous()], [self.parts[index]], self.layout, rows)
        return moved
