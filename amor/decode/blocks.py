"""One token per row through the compiled gated blocks: decisions, keys, firing, speculation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from amor.config import Config
from amor.decode.compile import Compiled, Pack
from amor.decode.policy import Policy
from amor.decode.reader import BlockInputs, HeadReader
from amor.form import Part
from amor.layout import Layout
from amor.models.block import Block
from amor.parts import RMSNorm
from amor.program import Program


@dataclass(frozen=True)
class Residual:
    """The residual [R, D] before a block or behind the last, and the columns computed from it."""

    h: Tensor
    columns: dict[int, Tensor]  # [R, D] each


@dataclass(frozen=True)
class AllBlocksProgram:
    """All blocks in sequence as if every one fired; parts of the program can be run.

    Inputs: the residuals before each block and behind the last, each block's input, and the output
    vector of the last residual, or (`final`) of every residual but the first.
    """

    compiled: Compiled
    kv_start: list[int]  # per block: the instruction its keys begin with,
    attn_start: list[int]  # the one after its keys,
    end: list[int]  # and the one after all of it; norms of what is read next follow
    final: bool
    has_final_norm: bool

    @classmethod
    def of(
        cls, blocks: Sequence[Block], final_norm: RMSNorm | None, config: Config, pack: Pack
    ) -> AllBlocksProgram:
        """Record and compile the program of these blocks."""
        count, final = len(blocks), config.blocks.probe == "final"
        p = Program(*[config.width] * (2 * count + 1 + (count if final else 1)))
        residuals, inputs = p.inputs[: count + 1], p.inputs[count + 1 : 2 * count + 1]
        outputs = p.inputs[2 * count + 1 :]
        kv_start, attn_start, end = [], [], []
        for index, block in enumerate(blocks):
            p.layer(index)
            kv_start.append(len(p.instructions))
            block.keys_program(p, inputs[index])
            attn_start.append(len(p.instructions))
            block.program(p, residuals[index], inputs[index], residuals[index + 1])
            end.append(len(p.instructions))
            after, last = residuals[index + 1], index + 1 == count
            next_norm = None if last else blocks[index + 1].norm
            if next_norm is not None:
                p.norm(after, next_norm, out=inputs[index + 1])
            if final_norm is not None and (final or last):
                p.norm(after, final_norm, out=outputs[index if final else 0])
        return cls(Compiled(p, pack), kv_start, attn_start, end, final, final_norm is not None)

    def fire(
        self,
        index: int,
        h: Tensor,
        x: Tensor,
        parts: list[Part],
        layout: Layout,
        rows: Tensor | None,
    ) -> Tensor:
        """The residual of some rows (None: all) after block `index`; their keys are written."""
        inputs, after = [h] * len(self.compiled.input_widths), torch.empty_like(h)
        inputs[len(self.end) + 1 + index], inputs[index + 1] = x.contiguous(), after
        steps = self.attn_start[index], self.end[index]
        self.compiled(inputs, parts, layout, rows, steps=steps)
        return after

    def run(
        self, index: int, h: Tensor, x: Tensor, parts: list[Part], layout: Layout
    ) -> list[Residual]:
        """The residual after every block from `index` on, if all of them fire."""
        count = len(self.end)
        inputs = list(torch.empty(len(self.compiled.input_widths), *h.shape).unbind())
        inputs[index], inputs[count + 1 + index] = h, x
        steps = self.kv_start[index], len(self.compiled.instructions)
        self.compiled(inputs, parts, layout, steps=steps)
        residuals = []
        for block in range(index, count):
            after, columns = inputs[block + 1], {}
            if block + 1 < count:
                columns[block + 1] = inputs[count + 2 + block]
            if self.final or block + 1 == count:
                output = inputs[2 * count + 1 + (block if self.final else 0)]
                columns[count] = output if self.has_final_norm else after
            residuals.append(Residual(after, columns))
        return residuals


@dataclass(frozen=True)
class CompiledBlocks:
    """The K blocks and the norms around them, compiled."""

    norms: list[RMSNorm | None]  # per column: of each block's input and of the output vector
    norm_f: Compiled | None  # of the residual, in place; None where it is the pre-norm of block 0
    inputs: list[Compiled]  # by first column: all columns from there on, of a residual
    closed: Compiled  # where no block fires: each block's input and keys, then the output vector
    closed_steps: list[int]  # number of its instructions for the first 0, 1, ... columns
    all_blocks: AllBlocksProgram


class GatedPass:
    """One token per row through the blocks.

    As long as no block fires, the inputs of later blocks are known. Keys and values do not depend
    on a decision, so they are written together, before a firing or at the end.

    Speculation: blocks of trained models fire together. After all rows fired at a block, and if the
    policy expects more, the later blocks are run as if all rows fired there too, and one pass over
    the head reads the inputs of all of them and the output vector. The gates then decide from these
    readings one after the other. While all rows fire, the speculated residuals stand. At the first
    block where a row does not fire they are dropped; keys of later blocks are written again to the
    same slots (a slot is a position) and no query has attended to them in between, so the result is
    exact.
    """

    def __init__(
        self,
        blocks: CompiledBlocks,
        h: Tensor,
        columns: Tensor | None,
        layout: Layout,
        parts: list[Part],
        reader: HeadReader,
    ):
        """columns: [K + 1, R, D] of the residual h where they are computed already."""
        self.blocks, self.layout, self.parts, self.reader = blocks, layout, parts, reader
        self.count = len(parts)
        self.fires: list[list[bool]] = []  # per block, per row
        self.scores: list[list[float]] = []
        self.written = 0  # blocks whose keys and values are written
        self.speculated: dict[int, Residual] = {}  # after a block, if all rows fire up to it
        self.move(Residual(h, {}), 0, columns)

    def move(self, to: Residual, start: int, columns: Tensor | None = None) -> None:
        """Continue with another residual; columns from `start` on are computed from it."""
        self.h, self.start, self.known, self._columns = to.h, start, to.columns, columns

    @property
    def columns(self) -> Tensor:
        """[columns, R, D] from `start` on, if no further block fires.

        A column without a norm is the residual itself and need not be filled in here.
        """
        if self._columns is None:
            self._columns = self.columns_of(self.h, self.start)
        return self._columns

    def column(self, index: int) -> Tensor:
        """[R, D] the input of block `index`, or (after the last) the output vector."""
        if index in self.known:
            return self.known[index]
        return self.h if self.blocks.norms[index] is None else self.columns[index - self.start]

    def columns_of(self, h: Tensor, start: int) -> Tensor:
        """The columns from `start` on of any residual."""
        out = torch.empty(self.count + 1 - start, *h.shape)
        self.blocks.inputs[start]([h, *out])
        return out

    def some_columns(self, h: Tensor, columns: list[int]) -> Tensor:
        """[columns, n, D] of the current residual, or of some of its rows."""
        first = self.start if h is self.h else columns[0]
        every = self.columns if h is self.h else self.columns_of(h, first)
        for column in columns:
            if self.blocks.norms[column] is None:
                every[column - first].copy_(h)
        return torch.stack([every[column - first] for column in columns])

    def run(self, sparse: bool, policy: Policy) -> Tensor:
        """Through all blocks; returns the output vectors [R, D]."""
        for index in range(self.count):
            self.run_block(index, sparse, policy)
        self.write_keys(self.count)
        policy.observe(self.fires)
        return self.column(self.count)

    def run_block(self, index: int, sparse: bool, policy: Policy) -> None:
        """Block `index`: queries, attention and the rest only for rows that fire."""
        fires = self.decide(index)
        after = self.speculated.pop(index, None)
        if after is not None and not all(fires):
            self.speculated, self.written, after = {}, index + 1, None
            self.reader.drop_ahead(fires)
        if not any(fires) and sparse:
            return
        if after is None and all(fires) and self.should_speculate(index, policy):
            after = self.speculate(index)
        if after is None:
            after = Residual(self.fire(index, fires, sparse), {})
        self.reader.fired(fires)
        self.move(after, index + 1)

    def decide(self, index: int) -> list[bool]:
        """Which rows fire at block `index`."""
        if not self.reader.follows(index):
            x = self.column(index)
            probe = self.column(self.count) if self.reader.final else x
            vectors = BlockInputs(self.h, x, probe)
            fires, scores = self.reader.decide(index, vectors, self.layout.start)
            self.fires.append(fires)
            self.scores.append(scores)
        else:
            self.fires.append(self.fires[-1])
            self.scores.append(self.scores[-1])
        return self.fires[-1]

    def should_speculate(self, index: int, policy: Policy) -> bool:
        """Whether to run the blocks after `index`, where all rows fire, as if they fired too."""
        later = range(index + 1, self.count)
        if all(self.reader.follows(block) for block in later):  # then they will
            return True
        columns = [*later, self.count]
        every = self.reader.read_columns[-len(columns) :] == columns
        one_pass = len(columns) * len(self.h) <= self.reader.most
        return self.reader.joint and every and one_pass and policy.speculates()

    def speculate(self, index: int) -> Residual:
        """Run blocks from `index` on as if all rows fired; read the head once for all of them."""
        self.write_keys(index)
        residuals = self.blocks.all_blocks.run(
            index, self.h, self.column(index), self.parts, self.layout
        )
        self.written = self.count
        self.speculated = dict(enumerate(residuals, index))
        if any(not self.reader.follows(block) for block in range(index + 1, self.count)):
            columns = [self.count if self.reader.final else k + 1 for k in self.speculated]
            vectors = [r.columns[c] for r, c in zip(residuals, columns, strict=True)]
            self.reader.read_ahead(index + 1, torch.stack(vectors))
        return self.speculated.pop(index)

    def fire(self, index: int, fires: list[bool], sparse: bool) -> Tensor:
        """The residual after block `index`; rows that do not fire keep theirs."""
        self.write_keys(index + 1)
        program, h, x = self.blocks.all_blocks, self.h, self.column(index)
        if all(fires) or not sparse:
            after = program.fire(index, h, x, self.parts, self.layout, None)
            return after if all(fires) else torch.where(torch.tensor(fires)[:, None], after, h)
        rows = torch.tensor(fires).nonzero()[:, 0]
        fired = program.fire(index, h[rows], x[rows], self.parts, self.layout, rows)
        return h.index_put((rows,), fired)

    def write_keys(self, to: int) -> None:
        """Keys and values of the blocks before `to`, in one call; none fired since the last call.

        It computes the columns on the way.
        """
        if to > self.written:
            columns = self._columns
            if columns is None:
                columns = torch.empty(self.count + 1 - self.start, *self.h.shape)
            steps, last = self.blocks.closed_steps, to + (to == self.count)
            inputs = [self.h] * (1 + self.start) + list(columns)
            self.blocks.closed(
                inputs, self.parts, self.layout, steps=(steps[self.written], steps[last])
            )
            if self.written == self.start and to == self.count:
                self._columns = columns
        self.written = max(self.written, to)
