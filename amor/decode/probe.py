"""What the head says in one step: read once for every probe to come, and again only for rows that fired.

Block k's input and the output's are known in advance as long as no block fires. In decode the head is limited by the
memory it is read from, so one pass serves all of them. A reading belongs to the vector it was made of: it stands while
that vector's bits stand, so a row that fires is read again and no other.

The 8-bit head gives an entropy and a bound on its error. Where the gate decides alike at both ends, that is its decision.
Where it does not, the exact logits of the likeliest tokens narrow the bound; where that is not enough, the exact head is
read. Where only the best next token is wanted, the 8-bit head serves the output too: it leaves a handful of tokens that could
be the best, and their exact logits decide. It is asked while that is expected to pay.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from amor.decode.savings import Savings
from amor.errors import AmorError
from amor.gates.base import Evidence, Gate
from amor.layout import Layout
from amor.models.amor import Amor
from amor.models.probe import Residuals, Separate
from amor.ops.product import ROWS, Matrix, bound, pack, probe
from amor.ops.product.best import best
from amor.ops.product.pages import settle
from amor.ops.product.refine import refine

MEMORY = 0.98  # a token ago counts this much of the present one in what is expected
CLEARLY = 0.1  # exact passes the 8-bit copy has to save: what goes on around its pass is not in the sum


@dataclass
class Passes:
    """Times the head's weights were read, and for how many vectors."""

    exact: int = 0
    rows: int = 0
    cheap: int = 0  # over the 8-bit copy
    cheap_rows: int = 0


class Head:
    """The tied head ready for few rows, and its 8-bit copy where cheap probes are wanted."""

    def __init__(self, weight: Tensor, kind: str, cheap: bool):
        self.matrix: Matrix = pack(weight, kind)
        # an 8-bit head needs no cheaper copy of itself
        self.copy: Matrix | None = pack(weight, "int8") if cheap and kind == "float32" else None
        self.passes = Passes()
        settle(t for m in self.matrices() for t in (m.weight, m.scales) if t is not None)
        self.copy_cost = 1.0 if self.copy is None else _relative(self.matrix, self.copy)
        self.fired = self.doubted = 0.0  # blocks a token that fired, and that the 8-bit head could not decide, of late

    def expect(self, fired: float, doubted: float) -> None:
        """Take in what one more token did."""
        self.fired += (1 - MEMORY) * (fired - self.fired)
        self.doubted += (1 - MEMORY) * (doubted - self.doubted)

    def copy_pays(self, blocks: int, best: bool = False) -> bool:
        """Whether the 8-bit copy is expected to save time, in exact passes beyond the one that gives the output.

        Without it every firing costs one. With it, a pass over the copy is made for all probes and again after a firing,
        unless that was the last block's. A doubt costs an exact pass, which serves the output too if nothing fires after it.
        Where the best token is all that is wanted of the output, its pass is over the copy too.
        """
        if self.copy is None:
            return False
        if best:
            return 1 + self.fired > self.copy_cost * (1 + self.fired) + self.doubted + CLEARLY
        again = self.fired * (blocks - 1) / max(blocks, 1)
        return self.fired > self.copy_cost * (1 + again) + self.doubted * min(1.0, self.fired) + CLEARLY

    def matrices(self) -> list[Matrix]:
        return [self.matrix] if self.copy is None else [self.matrix, self.copy]

    @property
    def nbytes(self) -> int:
        return sum(m.nbytes for m in self.matrices())


def _relative(matrix: Matrix, copy: Matrix) -> float:
    """Seconds of a pass over the copy for three rows with all that goes with it, in passes over the matrix for one.

    It differs from machine to machine: where three rows are limited by arithmetic, the copy gains less than its bytes say.
    """
    x = torch.ones(3, matrix.inner, device=matrix.weight.device)
    sides = [lambda: probe(x[:1], matrix, logits=True), lambda: bound(x, copy, probe(x, copy, logits=True))]
    best = [float("inf")] * 2
    for _ in range(6):
        for side, work in enumerate(sides):
            began = time.perf_counter()
            work()
            best[side] = min(best[side], time.perf_counter() - began)
    return best[1] / best[0]


class Probes:
    """One step's readings: column k for block k's input, the last column for the output's, [columns, rows] each."""

    def __init__(
        self,
        head: Head,
        gates: Sequence[Gate],
        inputs: Callable[[Tensor, int], list[Tensor]],  # residual [n, D], k -> inputs k.. and the output's, nothing firing
        savings: Savings,
        most: int = ROWS,
        best: bool = False,  # of the output only the best token is wanted
    ):
        self.head, self.gates, self.inputs, self.savings, self.most = head, gates, inputs, savings, most
        self.last = len(gates)
        self.asked = [index for index, gate in enumerate(gates) if gate.needs] + [self.last]
        self.wants_margin = any("margin" in gate.needs for gate in gates)
        self.log_vocab = math.log(head.matrix.outputs)
        self.cheaply = savings.cheap and (head.copy_pays(len(gates), best) or not savings.joint)
        self.best = best and self.cheaply and head.copy is not None
        self.rows = -1
        self.doubts = 0

    def _room(self, x: Tensor) -> None:
        """Empty columns for the rows of this step."""
        self.rows = x.shape[0]
        shape = self.last + 1, self.rows
        # not a number: equal to nothing, so that no vector is taken for one that was read
        self.read, self.read_cheaply = (x.new_full((*shape, x.shape[1]), torch.nan) for _ in range(2))
        self.entropy, self.margin, self.cheap, self.slack = (torch.zeros(shape, device=x.device) for _ in range(4))
        self.logits = torch.empty(0, device=x.device)
        self.cheap_logits: dict[tuple[int, int], Tensor] = {}  # (column, row) -> [V]

    def ask(self, index: int, h: Tensor, x: Tensor, position: Tensor) -> Evidence:
        """What gate `index` may know of its rows: h [R, D] the residual, x what the block reads of it."""
        gate = self.gates[index]
        if "gain" in gate.needs:
            raise AmorError("the oracle gate needs the true next tokens, which a decode step does not know; use another gate")
        if not gate.needs:
            return Evidence(x, position)
        if self.rows != x.shape[0]:
            self._room(x)
        if self.cheaply and self.head.copy is not None and gate.needs == {"entropy"}:
            return self._ask_cheaply(index, h, x, position)
        self._look(_places(~self._known(self.read, index, x)), index, h)
        return Evidence(x, position, self.entropy[index], self.margin[index])

    def _ask_cheaply(self, index: int, h: Tensor, x: Tensor, position: Tensor) -> Evidence:
        exact = self._known(self.read, index, x)
        self._look_cheaply(_places(~exact & ~self._known(self.read_cheaply, index, x)), index, h)
        unsure = ~exact & ~self._sure(index, x, position)
        if bool(unsure.any()):
            self._refine(_places(unsure), index)
            unsure = unsure & ~self._sure(index, x, position)
            self.doubts += int(unsure.sum())
            self._look(_places(unsure), index, h)
        return Evidence(x, position, torch.where(exact | unsure, self.entropy[index], self.cheap[index]))

    def _sure(self, index: int, x: Tensor, position: Tensor) -> Tensor:
        ends = (self.cheap[index] + side * self.slack[index] for side in (-1, 1))
        low, high = (Evidence(x, position, end) for end in ends)
        return self.gates[index].sure(low, high)

    def output(self, hidden: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        """Of the output's vectors [R, D]: logits [R, V], or [R, 0] and the best token [R]; and entropy in nats [R]."""
        if self.rows != hidden.shape[0]:
            self._room(hidden)
        if self.best:
            tokens, entropy = self._best(hidden)
            return hidden[:, :0], tokens, entropy * self.log_vocab
        stale = _places(~self._known(self.read, self.last, hidden))
        if stale.numel():
            self._note(stale, [self.last], [hidden[stale]])
        return self.logits, None, self.entropy[self.last] * self.log_vocab

    def _best(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The best token and the entropy of each row, over the 8-bit head where the exact one was not read anyway."""
        assert self.head.copy is not None
        exact = self._known(self.read, self.last, hidden)
        stale = _places(~exact & ~self._known(self.read_cheaply, self.last, hidden))
        if stale.numel():
            self._note_cheaply(stale, [self.last], [hidden[stale]])
        rounded = _places(~exact)
        tokens = torch.empty(self.rows, dtype=torch.long, device=hidden.device)
        if rounded.numel():
            logits = self._cheap_logits(self.last, rounded)
            tokens[rounded] = best(hidden[rounded], self.head.matrix, self.head.copy, logits)
        if rounded.numel() < self.rows:
            tokens[exact] = self.logits[exact].argmax(-1)
        return tokens, torch.where(exact, self.entropy[self.last], self.cheap[self.last])

    def _known(self, read: Tensor, index: int, x: Tensor) -> Tensor:
        return (read[index] == x).all(-1)

    def _ahead(self, index: int, rows: int, columns: list[int]) -> list[int]:
        """The columns worth reading now: all to come where one pass serves them, else this one."""
        coming = [c for c in columns if c >= index]
        return coming if self.savings.joint and rows * len(coming) <= self.most else [index]

    def _look(self, places: Tensor, index: int, h: Tensor) -> None:
        if places.numel():
            columns = self._ahead(index, places.shape[0], self.asked)
            inputs = self.inputs(h[places], index)
            self._note(places, columns, [inputs[c - index] for c in columns])

    def _note(self, places: Tensor, columns: list[int], inputs: list[Tensor]) -> None:
        """Read the exact head for some columns of some rows."""
        rows, output = places.shape[0], columns[-1] == self.last
        x = torch.cat(inputs)
        found = probe(x, self.head.matrix, logits=output, last=rows)
        self._count("", rows * len(columns))
        where, shape = self._where(columns, places), (len(columns), rows)
        self.read[where] = x.view(*shape, -1)
        self.entropy[where] = (found.entropy / self.log_vocab).view(shape)
        if self.wants_margin:
            self.margin[where] = found.margin.view(shape)
        if output:
            assert found.logits is not None
            if rows == self.rows:
                self.logits = found.logits
            else:
                if not self.logits.numel():
                    self.logits = found.logits.new_empty(self.rows, found.logits.shape[1])
                self.logits[places] = found.logits

    def _where(self, columns: list[int], places: Tensor) -> tuple[Any, ...]:
        """Columns and rows as an index; as slices where they can be, which are faster."""
        if places.shape[0] == self.rows and columns[-1] - columns[0] == len(columns) - 1:
            return (slice(columns[0], columns[-1] + 1),)
        return torch.tensor(columns)[:, None], places[None]

    def _look_cheaply(self, places: Tensor, index: int, h: Tensor) -> None:
        if places.numel():
            columns = self._ahead(index, places.shape[0], self.asked if self.best else self.asked[:-1])
            inputs = self.inputs(h[places], index)
            self._note_cheaply(places, columns, [inputs[c - index] for c in columns])

    def _note_cheaply(self, places: Tensor, columns: list[int], inputs: list[Tensor]) -> None:
        """Read the 8-bit head for some columns of some rows."""
        assert self.head.copy is not None
        x = torch.cat(inputs)
        found = probe(x, self.head.copy, logits=True)
        assert found.logits is not None
        shape = len(columns), places.shape[0]
        self._count("cheap_", x.shape[0])
        for column, logits in zip(columns, found.logits.split(shape[1]), strict=True):
            for row, z in zip(places.tolist(), logits, strict=True):
                self.cheap_logits[column, row] = z
        where = self._where(columns, places)
        self.read_cheaply[where] = x.view(*shape, -1)
        self.cheap[where] = (found.entropy / self.log_vocab).view(shape)
        self.slack[where] = (bound(x, self.head.copy, found) / self.log_vocab).view(shape)

    def _refine(self, places: Tensor, index: int) -> None:
        """Narrow the bound of some rows by the exact logits of their likeliest tokens."""
        assert self.head.copy is not None
        x = self.read_cheaply[index, places]
        entropy, slack = refine(x, self.head.matrix, self.head.copy, self._cheap_logits(index, places))
        self.cheap[index, places] = entropy / self.log_vocab
        self.slack[index, places] = slack / self.log_vocab

    def _cheap_logits(self, index: int, places: Tensor) -> Tensor:
        return torch.stack([self.cheap_logits[index, row] for row in places.tolist()])

    def _count(self, kind: str, rows: int) -> None:
        passes = self.head.passes
        field = "cheap" if kind else "exact"
        setattr(passes, field, getattr(passes, field) + -(-rows // ROWS))
        setattr(passes, f"{kind}rows", getattr(passes, f"{kind}rows") + rows)


def _places(marks: Tensor) -> Tensor:
    return marks.nonzero()[:, 0]


class Stepping:
    """Probes as a strategy for the model's own forward: one token a row is read ahead, longer calls a block at a time."""

    def __init__(self, model: Amor, head: Head, plain: Separate, savings: Savings, most: int = ROWS):
        gates = [block.gate for block in model.each_block()]
        self.probes, self.plain, self.head = Probes(head, gates, inputs_of(model), savings, most), plain, head

    @torch.no_grad()
    def __call__(self, index: int, h: Tensor, x: Tensor, layout: Layout, needs: frozenset[str], opened: Residuals) -> Evidence:
        if x.shape[1] > 1 or layout.valid is not None:
            return self.plain(index, h, x, layout, needs, opened)
        seen = self.probes.ask(index, h[:, 0], x[:, 0], layout.positions[:, 0])
        entropy, margin = (None if t is None else t[:, None] for t in (seen.entropy, seen.margin))
        return Evidence(x, layout.positions, entropy, margin)


def inputs_of(model: Amor) -> Callable[[Tensor, int], list[Tensor]]:
    """What the head is asked if no block from `start` on fires: their inputs, then the output's vector."""

    def inputs(h: Tensor, start: int) -> list[Tensor]:
        found = [model.block_input(k, h) for k in range(start, len(model.blocks))]
        return [*found, h if model.final_norm is None else model.final_norm(h)]

    return inputs
