"""The gated blocks compiled for one token per row, for gates that decide in Python.

Keys and values do not depend on a decision, so those of consecutive blocks are written together,
before a firing or at the end. Queries, attention and the rest run only for rows that fire.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from amor.decode.compile import Compiled, Pack
from amor.decode.tables import StateEntries
from amor.gates.base import Verdict
from amor.layout import Layout
from amor.models.amor import Amor
from amor.models.block import Block
from amor.models.gated import Norms
from amor.parts import RMSNorm, touched
from amor.program import NoProgramError, Program, require_unwrapped


def record_columns(
    p: Program, norms: Norms[RMSNorm], blocks: Sequence[Block] | None = None
) -> list[int]:
    """Columns of the residual (the first input of a program) into its other inputs [K + 1].

    blocks: record the keys and values of each too. Returns the number of instructions for the first
    0, 1, ... columns.
    """
    steps = [0]
    for index, norm in enumerate(norms.columns):
        x = p.inputs[0]
        if norm is not None:
            x = p.norm(x, norm, out=p.inputs[1 + index])
        if blocks is not None and index < len(blocks):
            p.layer(index)
            blocks[index].keys_program(p, x)
        steps.append(len(p.instructions))
    return steps


class Residual:
    """The residual h [R, D] and its columns, computed when one is first needed."""

    def __init__(self, h: Tensor, columns: Tensor, filled: bool = False):
        """columns: [K + 1, R, D]; filled: those to come are computed already."""
        self.h, self.columns, self.filled = h, columns, filled


@dataclass(frozen=True)
class BlockPrograms:
    """Programs of the K blocks and of the norms around them.

    Inputs of a program: the residual, then its columns [K + 1].
    """

    norms: Norms[RMSNorm]
    enter: Compiled | None  # the norm before the blocks, in place
    columns: Compiled  # every column
    column_steps: list[int]  # number of its instructions for the first 0, 1, ... columns
    closed: Compiled  # where no block fires: each column, and the keys of its block
    closed_steps: list[int]
    # per block: from h, x (first two inputs) to the residual after it (third) and its columns
    fire: list[Compiled]
    fire_steps: list[int]  # number of instructions before the columns

    @classmethod
    def of(cls, model: Amor, pack: Pack) -> BlockPrograms:
        """Record and compile them; NoProgramError where one cannot be."""
        blocks, norms, width = model.each_block(), model.norms, model.config.width
        for block in blocks:
            for part in block.modules():
                if touched(part) and part is not block.gate:
                    raise NoProgramError(touched(part))
        require_unwrapped(model.norm_f)
        enter = None
        if norms.before is not None:
            p = Program(width)
            p.norm(p.inputs[0], norms.before, out=p.inputs[0])
            enter = Compiled(p, pack)

        columns, closed = (Program(*[width] * (2 + len(blocks))) for _ in range(2))
        column_steps = record_columns(columns, norms)
        closed_steps = record_columns(closed, norms, blocks)
        fire, ends = [], []
        for index, block in enumerate(blocks):
            p = Program(*[width] * (4 + len(blocks)))
            h, x, after, *outs = p.inputs
            p.layer(index)
            block.program(p, h, x, after)
            ends.append(len(p.instructions))
            for norm, out in zip(norms.columns[index + 1 :], outs[index + 1 :], strict=True):
                if norm is not None:
                    p.norm(after, norm, out=out)
            fire.append(Compiled(p, pack))
        every = Compiled(columns, pack), column_steps, Compiled(closed, pack), closed_steps
        return cls(norms, enter, *every, fire, ends)


class CompiledBlocks:
    """The blocks of one decode step: a token per row."""

    def __init__(
        self,
        programs: BlockPrograms,
        layout: Layout,
        parts: Sequence[StateEntries],
        sparse: bool = True,
    ):
        """parts: keys and values of each block, with a free slot; sparse: query fired rows only."""
        self.programs, self.layout, self.parts, self.sparse = programs, layout, parts, sparse
        self.count = len(parts)
        self.written = 0  # blocks whose keys and values are written

    def enter(self, h: Residual) -> Residual:
        return h  # the layers' program ends with the norm

    def input(self, index: int, h: Residual) -> Tensor:
        """[R, D] the input of block `index`, or (index K) the output vector."""
        if self.programs.norms.columns[index] is None:
            return h.h
        if not h.filled:
            steps = self.programs.column_steps
            self.programs.columns([h.h, *h.columns], steps=(steps[index], steps[-1]))
            h.filled = True
        return h.columns[index]

    def columns(self, h: Residual, which: Sequence[int], rows: list[int] | None) -> Tensor:
        """[columns, n, D] of the residual of some rows (None: all)."""
        every = [self.input(index, h) for index in which]
        return torch.stack(every if rows is None else [column[rows] for column in every])

    def write(self, index: int, h: Residual, x: Tensor) -> None:
        """Nothing yet: `_write` is called before a firing and at the end."""

    def queries(
        self, index: int, h: Residual, x: Tensor, before: Verdict | None
    ) -> tuple[Residual, Tensor, Verdict | None]:
        return h, x, before

    def apply(self, index: int, h: Residual, x: Tensor, verdict: Verdict) -> Residual:
        fires = verdict.fire.tolist()
        if not any(fires) and self.sparse:
            return h
        self._write(index + 1, h)
        if all(fires) or not self.sparse:
            after = self.fire(index, h.h, x)
            if not all(fires):
                after = Residual(torch.where(verdict.fire[:, None], after.h, h.h), after.columns)
            return after
        rows = verdict.fire.nonzero()[:, 0]
        after = self.fire(index, h.h[rows], x[rows], rows)
        return Residual(h.h.index_put((rows,), after.h), torch.empty_like(h.columns))

    def fire(self, index: int, h: Tensor, x: Tensor, rows: Tensor | None = None) -> Residual:
        """The residual of some rows (None: all) after block `index`; their keys are written.

        Of all rows, its columns too.
        """
        after, columns = torch.empty_like(h), torch.empty(self.count + 1, *h.shape)
        steps = None if rows is None else (0, self.programs.fire_steps[index])
        inputs = [h, x.contiguous(), after, *columns]
        self.programs.fire[index](inputs, self.parts, self.layout, rows, steps)
        return Residual(after, columns, filled=rows is None)

    def output(self, h: Residual) -> Tensor:
        self._write(self.count, h)
        return self.input(self.count, h)

    def _write(self, to: int, h: Residual) -> None:
        """Keys and values of the blocks before `to`, which did not fire since the last call.

        It fills in the columns on the way.
        """
        if to > self.written:
            steps, last = self.programs.closed_steps, to + (to == self.count)
            inputs = [h.h, *h.columns]
            self.programs.closed(
                inputs, self.parts, self.layout, steps=(steps[self.written], steps[last])
            )
            h.filled = h.filled or to == self.count
        self.written = max(self.written, to)
