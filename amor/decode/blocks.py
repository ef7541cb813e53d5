"""One token through the gated blocks: who is asked when, what is run for rows that fire, and what may be run ahead."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from amor.config import Config
from amor.decode.compile import Compiled, Pack
from amor.decode.policy import Policy
from amor.decode.reader import Asked, HeadReader
from amor.form import Part
from amor.layout import Layout
from amor.models.block import Block
from amor.parts import RMSNorm
from amor.program import Program


@dataclass(frozen=True)
class Residual:
    """The residual [R, D] before a block, or behind the last one, and what is known to be read of it: columns, [R, D] each."""

    h: Tensor
    columns: dict[int, Tensor]


@dataclass(frozen=True)
class Chain:
    """All blocks one after the other as if all of them fired, in one program of which parts may be run.

    Handed in are the residuals before each block and behind the last, what each block reads, and what the output reads: of the
    last residual, or (`final`) of all of them but the first, for then gates ask about it.
    """

    compiled: Compiled
    begins: list[int]  # of each block: the instruction its keys begin with,
    fires: list[int]  # the one behind its keys,
    ends: list[int]  # and the one behind all of it: norms of what is read next follow
    final: bool
    normed: bool  # whether what the output reads is more than the residual

    @classmethod
    def of(cls, blocks: Sequence[Block], final_norm: RMSNorm | None, config: Config, pack: Pack) -> Chain:
        count, final = len(blocks), config.blocks.probe == "final"
        p = Program(*[config.width] * (2 * count + 1 + (count if final else 1)))
        residuals, inputs, outputs = p.given[: count + 1], p.given[count + 1 : 2 * count + 1], p.given[2 * count + 1 :]
        begins, fires, ends = [], [], []
        for index, block in enumerate(blocks):
            p.layer(index)
            begins.append(len(p.steps))
            block.keys_program(p, inputs[index])
            fires.append(len(p.steps))
            block.program(p, residuals[index], inputs[index], residuals[index + 1])
            ends.append(len(p.steps))
            after, last = residuals[index + 1], index + 1 == count
            coming = None if last else blocks[index + 1].norm
            if coming is not None:
                p.norm(after, coming, out=inputs[index + 1])
            if final_norm is not None and (final or last):
                p.norm(after, final_norm, out=outputs[index if final else 0])
        return cls(Compiled(p, pack), begins, fires, ends, final, final_norm is not None)

    def fire(self, index: int, now: Tensor, x: Tensor, parts: list[Part], layout: Layout, rows: Tensor | None) -> Tensor:
        """The residual of some rows or of all behind block `index`; their keys are written already."""
        given, moved = [now] * len(self.compiled.given), torch.empty_like(now)
        given[len(self.ends) + 1 + index], given[index + 1] = x.contiguous(), moved
        self.compiled(given, parts, layout, rows, steps=(self.fires[index], self.ends[index]))
        return moved

    def run(self, index: int, now: Tensor, x: Tensor, parts: list[Part], layout: Layout) -> list[Residual]:
        """From block `index` on: the residual behind every block."""
        count = len(self.ends)
        given = list(torch.empty(len(self.compiled.given), *now.shape).unbind())
        given[index], given[count + 1 + index] = now, x
        self.compiled(given, parts, layout, steps=(self.begins[index], len(self.compiled.steps)))
        found = []
        for block in range(index, count):
            after, columns = given[block + 1], {}
            if block + 1 < count:
                columns[block + 1] = given[count + 2 + block]
            if self.final or block + 1 == count:
                columns[count] = given[2 * count + 1 + (block if self.final else 0)] if self.normed else after
            found.append(Residual(after, columns))
        return found


@dataclass(frozen=True)
class Blocks:
    """The K blocks and the norms around them, compiled."""

    norms: list[RMSNorm | None]  # by column: of what each block and the output read; None: the residual as it is
    norm_f: Compiled | None  # of the residual, in place; None where it is block 0's pre-norm
    inputs: list[Compiled]  # by first column: what blocks from there on and the output read of the residual
    closed: Compiled  # of a token that no block fires on: what each block reads, and its keys; then what the output reads
    closed_steps: list[int]  # how many of its instructions belong to the first 0, 1, ... columns
    chain: Chain


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

    def __init__(self, blocks: Blocks, h: Tensor, read: Tensor | None, layout: Layout, parts: list[Part], reader: HeadReader):
        """read: what is read of the residual h by all columns, where it is known."""
        self.blocks, self.layout, self.parts, self.reader = blocks, layout, parts, reader
        self.count = len(parts)
        self.fires: list[list[bool]] = []  # block by block, of every row
        self.scores: list[list[float]] = []
        self.written = 0  # blocks whose keys and values are written
        self.ahead: dict[int, Residual] = {}  # behind a block if all rows fire there, and at those run ahead before it
        self.move(Residual(h, {}), 0, read)

    def move(self, to: Residual, start: int, read: Tensor | None = None) -> None:
        """From here on the residual is another, and what blocks from `start` on and the output read is what they read of it."""
        self.h, self.start, self.known, self._inputs = to.h, start, to.columns, read

    @property
    def inputs(self) -> Tensor:
        """[columns, R, D] what is read of the residual by columns from `start` on, if no more block fires; where there is no norm
        it is the residual itself, which need not stand here."""
        if self._inputs is None:
            self._inputs = self.read_of(self.h, self.start)
        return self._inputs

    def column(self, index: int) -> Tensor:
        """[R, D] what block `index`, or (behind the last) the output, reads of the residual."""
        if index in self.known:
            return self.known[index]
        return self.h if self.blocks.norms[index] is None else self.inputs[index - self.start]

    def read_of(self, h: Tensor, start: int) -> Tensor:
        """The same of any residual."""
        out = torch.empty(self.count + 1 - start, *h.shape)
        self.blocks.inputs[start]([h, *out])
        return out

    def some_inputs(self, h: Tensor, columns: list[int]) -> Tensor:
        """What the head is asked of h, the present residual or some of its rows."""
        first = self.start if h is self.h else columns[0]
        ahead = self.inputs if h is self.h else self.read_of(h, first)
        for column in columns:
            if self.blocks.norms[column] is None:
                ahead[column - first].copy_(h)
        return torch.stack([ahead[column - first] for column in columns])

    def run(self, sparse: bool, policy: Policy) -> Tensor:
        """Through all blocks; the output's vectors [R, D]."""
        for index in range(self.count):
            self.through(index, sparse, policy)
        self.write_keys(self.count)
        policy.observe(self.fires)
        return self.column(self.count)

    def through(self, index: int, sparse: bool, policy: Policy) -> None:
        """Block `index`: queries, attention and what follows only for rows that fire."""
        fires = self.decide(index)
        foreseen = self.ahead.pop(index, None)
        if foreseen is not None and not all(fires):  # then what later blocks read is not what was run ahead
            self.ahead, self.written, foreseen = {}, index + 1, None
        if not any(fires) and sparse:
            return
        if foreseen is None and all(fires) and self.foresees(index, policy):
            foreseen = self.run_ahead(index)
        if foreseen is None:
            foreseen = Residual(self.fire(index, fires, sparse), {})
        self.move(foreseen, index + 1)

    def decide(self, index: int) -> list[bool]:
        """Which rows fire at block `index`; a gate that follows the one before it need not be asked."""
        if not self.reader.follows(index):
            x = self.column(index)
            asked = Asked(self.h, x, self.column(self.count) if self.reader.final else x)
            fires, scores = self.reader.decide(index, asked, self.layout.start)
            self.fires.append(fires)
            self.scores.append(scores)
        else:
            self.fires.append(self.fires[-1])
            self.scores.append(self.scores[-1])
        return self.fires[-1]

    def foresees(self, index: int, policy: Policy) -> bool:
        """Whether, as all rows fire at a block, the blocks to come are run as if they did there too."""
        coming = range(index + 1, self.count)
        if all(self.reader.follows(block) for block in coming):  # then they will
            return True
        columns = [*coming, self.count]
        every = self.reader.asked[-len(columns) :] == columns
        served = self.reader.joint and every and len(columns) * len(self.h) <= self.reader.most  # by one pass over the head
        return served and policy.foresees()

    def run_ahead(self, index: int) -> Residual:
        """Run block `index` and those to come as if all rows fired; where gates to come ask the head, ask once for all."""
        self.write_keys(index)
        found = self.blocks.chain.run(index, self.h, self.column(index), self.parts, self.layout)
        self.written = self.count
        self.ahead = dict(enumerate(found, index))
        if any(not self.reader.follows(block) for block in range(index + 1, self.count)):
            asked = [self.count if self.reader.final else block + 1 for block in self.ahead]
            self.reader.foretell(index + 1, torch.stack([one.columns[c] for one, c in zip(found, asked, strict=True)]))
        return self.ahead.pop(index)

    def fire(self, index: int, fires: list[bool], sparse: bool) -> Tensor:
        """The residual behind block `index`, which rows that do not fire keep."""
        self.write_keys(index + 1)
        chain, h, x = self.blocks.chain, self.h, self.column(index)
        if all(fires) or not sparse:
            moved = chain.fire(index, h, x, self.parts, self.layout, None)
            return moved if all(fires) else torch.where(torch.tensor(fires)[:, None], moved, h)
        rows = torch.tensor(fires).nonzero()[:, 0]
        return h.index_put((rows,), chain.fire(index, h[rows], x[rows], self.parts, self.layout, rows))

    def write_keys(self, to: int) -> None:
        """Keys and values of blocks up to `to`, in one call; the residual has not moved since the last ones.

        What they read, and behind the last what the output reads, is found on the way, or once more to the same bits.
        """
        if to > self.written:
            read = torch.empty(self.count + 1 - self.start, *self.h.shape) if self._inputs is None else self._inputs
            ends, last = self.blocks.closed_steps, to + (to == self.count)
            self.blocks.closed(
                [self.h] * (1 + self.start) + list(read), self.parts, self.layout, steps=(ends[self.written], ends[last])
            )
            if self.written == self.start and to == self.count:
                self._inputs = read
        self.written = max(self.written, to)
