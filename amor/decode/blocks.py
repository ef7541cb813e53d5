"""One token through the gated blocks: who is asked when, what is run for rows that fire, and what may be run ahead."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from amor.decode.compile import Compiled
from amor.decode.policy import Policy
from amor.decode.reader import Asked, HeadReader
from amor.form import Part
from amor.gates.base import Verdict
from amor.layout import Layout


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
        self.verdict: Verdict | None = None  # of the last block
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
        for column, normed in zip(out, self.normed[start:], strict=True):
            if not normed:
                column.copy_(h)
        self.blocks.inputs[start]([h, *out])
        return out

    def asked(self, x: Tensor) -> Tensor:
        """What the head is asked about by the gate of a block that reads x of the present residual."""
        return self.inputs[-1] if self.reader.final else x

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
        self.verdict = self.reader.decide(index, Asked(self.h, x, self.asked(x)), self.layout.start, self.verdict)
        fires = self.verdict.fire.tolist()
        self.fires.append(fires)
        self.scores.append(self.verdict.score.tolist())
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
            vectors.append(self.asked(self.inputs[0]))
            self.ahead[index] = self.fire(index, self.h, self.inputs[0])
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
