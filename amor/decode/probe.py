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
from functools import cache

import torch
from torch import Tensor

from amor.decode.savings import Savings
from amor.errors import AmorError
from amor.gates.base import Evidence, Gate
from amor.layout import Layout
from amor.models.amor import Amor
from amor.models.probe import Residuals, Separate
from amor.ops.product import ROWS, Matrix, pack, probe
from amor.ops.product.best import best
from amor.ops.product.pages import settle
from amor.ops.product.refine import refine

MEMORY = 0.98  # a token ago counts this much of the present one in what is expected
CLEARLY = 0.05  # exact passes the 8-bit copy has to save: what goes on around its pass is not in the sum


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
        self.copy: Matrix | None = pack(weight, "int8", gain=True) if cheap and kind == "float32" else None
        self.passes = Passes()
        settle(t for m in self.matrices() for t in (m.weight, m.scales) if t is not None)
        self.copy_cost = 1.0 if self.copy is None else _relative(self.matrix, self.copy)
        # of late, shares: tokens at which some block fired; firings that another one followed; and blocks a token that the 8-bit
        # head could not decide
        self.fires = self.again = self.doubted = 0.0

    def expect(self, fired: Sequence[Sequence[int]], rows: int, doubts: int) -> None:
        """Take in what one more token of some rows did: which of them fired, block by block."""
        self.fires = _follow(self.fires, len(set().union(*fired)) / rows)
        self.doubted = _follow(self.doubted, doubts / rows)
        for index, here in enumerate(fired[:-1]):
            if here:
                later = set().union(*fired[index + 1 :])
                self.again = _follow(self.again, len(later.intersection(here)) / len(here))

    def copy_pays(self, fires: float, best: bool = False) -> bool:
        """Whether blocks that will fire with this probability are better asked over the 8-bit copy.

        A pass over the exact head serves the output too, unless one of them fires; a pass over the copy has to be followed by
        that of the output. Where the best token is all that is wanted of the output, its pass is over the copy too. A doubt
        costs an exact pass, which serves the output as well if nothing fires after it.
        """
        if self.copy is None:
            return False
        if best:
            return self.copy_cost + self.doubted + CLEARLY < 1
        return self.copy_cost + self.doubted * fires + CLEARLY < fires

    def matrices(self) -> list[Matrix]:
        return [self.matrix] if self.copy is None else [self.matrix, self.copy]

    @property
    def nbytes(self) -> int:
        return sum(m.nbytes for m in self.matrices())


def _follow(average: float, new: float) -> float:
    return average + (1 - MEMORY) * (new - average)


def _relative(matrix: Matrix, copy: Matrix) -> float:
    """Seconds of a pass over the copy for three rows, in passes over the matrix for one.

    It differs from machine to machine: where three rows are limited by arithmetic, the copy gains less than its bytes say.
    """
    x = torch.ones(3, matrix.inner, device=matrix.weight.device)
    sides = [lambda: probe(x[:1], matrix, logits=True), lambda: probe(x, copy, logits=True)]
    best = [float("inf")] * 2
    for _ in range(6):
        for side, work in enumerate(sides):
            began = time.perf_counter()
            work()
            best[side] = min(best[side], time.perf_counter() - began)
    return best[1] / best[0]


EVERY = slice(None)
Places = Tensor | slice  # rows of a step: some, or every one


@dataclass
class Reading:
    """What one head said of one column, [R] rows."""

    x: Tensor  # [R, D] the vectors that were read; not a number for rows that were not
    told: Tensor  # [2 or 3, R] entropy over log(vocab), how far it may be off, margin where a gate wants it
    logits: Tensor | None  # [R, V] where they were wanted

    def with_rows(self, places: Tensor, new: Reading) -> Reading:
        """This, with some rows read anew."""
        x, told = self.x.index_put((places,), new.x), self.told.index_copy(1, places, new.told)
        logits = self.logits
        if new.logits is not None:
            logits = new.logits.new_empty(len(x), new.logits.shape[1]) if logits is None else logits.clone()
            logits[places] = new.logits
        return Reading(x, told, logits)


class Probes:
    """One step's readings: column k for block k's input, the last column for the output's vector.

    Masks of rows are tensors [R]. The two that are nearly always met, all rows and none, are known by being `every` and
    `none` themselves, so that a step of one row makes few of them.
    """

    def __init__(
        self,
        head: Head,
        gates: Sequence[Gate],
        inputs: Callable[[Tensor, list[int]], Tensor],  # residual [n, D], columns -> [columns, n, D], nothing firing
        savings: Savings,
        most: int = ROWS,
        best: bool = False,  # of the output only the best token is wanted
    ):
        self.head, self.gates, self.inputs, self.savings, self.most = head, gates, inputs, savings, most
        self.last = len(gates)
        self.asked = [index for index, gate in enumerate(gates) if gate.needs] + [self.last]
        self.wants_margin = any("margin" in gate.needs for gate in gates)
        self.log_vocab = math.log(head.matrix.outputs)
        self.copied = savings.cheap and head.copy is not None
        self.best = best and self.copied and (head.copy_pays(head.fires, best=True) or not savings.joint)
        self.doubts = 0
        self.none = self.every = torch.empty(0)

    def _begin(self, rows: int) -> None:
        """Nothing was read yet of the rows of this step."""
        self.none, self.every = _masks(rows, self.head.matrix.weight.device)
        self.exact: list[Reading | None] = [None] * (self.last + 1)
        self.cheap: list[Reading | None] = [None] * (self.last + 1)

    def ask(self, index: int, h: Tensor, x: Tensor, position: Tensor) -> Evidence:
        """What gate `index` may know of its rows: h [R, D] the residual, x what the block reads of it."""
        gate = self.gates[index]
        if "gain" in gate.needs:
            raise AmorError("the oracle gate needs the true next tokens, which a decode step does not know; use another gate")
        if not gate.needs:
            return Evidence(x, position)
        if len(self.none) != len(x):
            self._begin(len(x))
        known = self._known(self.exact[index], x)
        if known is not self.every and gate.needs == {"entropy"} and self._cheaply(index, x):
            return Evidence(x, position, self._entropy(index, h, x, position, known))
        self._look(self.exact, known, index, h)
        told = self._told(self.exact, index)
        return Evidence(x, position, told[0], told[2] if self.wants_margin else None)

    def _cheaply(self, index: int, x: Tensor) -> bool:
        """Whether the 8-bit head was read for some of these rows, or should be."""
        if not self.copied or self.best or not self.savings.joint:
            return self.copied
        if self._known(self.cheap[index], x) is not self.none:
            return True
        began = any(self.exact) or any(self.cheap)  # then some block has fired
        return self.head.copy_pays(self.head.again if began else self.head.fires)

    def _entropy(self, index: int, h: Tensor, x: Tensor, position: Tensor, exact: Tensor) -> Tensor:
        """By the 8-bit head, but exact for rows that head was read for, and for those the gate could not decide otherwise."""
        self._look(self.cheap, self._either(exact, self._known(self.cheap[index], x)), index, h)
        decided = self._either(exact, self._sure(index, x, position))
        if not bool(decided.all()):
            self._refine(self._rest(decided), index)
            decided = decided | self._sure(index, x, position)
            self.doubts += int((~decided).sum())
            self._look(self.exact, decided, index, h)
            exact = self._either(exact, ~decided)
        entropy = self._told(self.cheap, index)[0]
        return entropy if self.exact[index] is None else torch.where(exact, self._told(self.exact, index)[0], entropy)

    def _sure(self, index: int, x: Tensor, position: Tensor) -> Tensor:
        entropy, off = self._told(self.cheap, index)[:2]
        ends = torch.stack([entropy - off, entropy + off])
        return self.gates[index].sure(Evidence(x.expand(2, *x.shape), position.expand(ends.shape), ends))

    def output(self, hidden: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        """Of the output's vectors [R, D]: logits [R, V], or [R, 0] and the best token [R]; and entropy in nats [R]."""
        if len(self.none) != len(hidden):
            self._begin(len(hidden))
        known = self._known(self.exact[self.last], hidden)
        if self.best and known is not self.every:
            tokens, entropy = self._best(hidden, known)
            return hidden[:, :0], tokens, entropy * self.log_vocab
        self._read(self.exact, known, [self.last], lambda places: hidden[places])
        found = self.exact[self.last]
        assert found is not None and found.logits is not None
        return found.logits, None, found.told[0] * self.log_vocab

    def _best(self, hidden: Tensor, exact: Tensor) -> tuple[Tensor, Tensor]:
        """The best token and the entropy of each row, over the 8-bit head where the exact one was not read anyway."""
        known = self._either(exact, self._known(self.cheap[self.last], hidden))
        self._read(self.cheap, known, [self.last], lambda places: hidden[places])
        found, held = self.cheap[self.last], self.exact[self.last]
        assert self.head.copy is not None and found is not None and found.logits is not None
        if held is None or held.logits is None:
            return best(hidden, self.head.matrix, self.head.copy, found.logits), found.told[0]
        tokens, rest = held.logits.argmax(-1), _places(~exact)
        tokens[rest] = best(hidden[rest], self.head.matrix, self.head.copy, found.logits[rest])
        return tokens, torch.where(exact, held.told[0], found.told[0])

    def _known(self, found: Reading | None, x: Tensor) -> Tensor:
        """[R] whether a reading is of these vectors."""
        if found is None:
            return self.none
        if torch.equal(found.x, x):
            return self.every
        return self.none if len(x) == 1 else (found.x == x).all(-1)

    def _either(self, a: Tensor, b: Tensor) -> Tensor:
        return b if a is self.none else a if b is self.none else a | b

    def _told(self, readings: list[Reading | None], index: int) -> Tensor:
        found = readings[index]
        assert found is not None
        return found.told

    def _look(self, readings: list[Reading | None], known: Tensor, index: int, h: Tensor) -> None:
        """Read a head for a column of rows not known yet, and for all columns to come where one pass serves them."""
        if known is self.every:
            return
        columns = self.asked if readings is self.exact or self.best else self.asked[:-1]
        ahead = [c for c in columns if c >= index]
        rows = self._count_of(self._rest(known))
        if not self.savings.joint or rows * len(ahead) > self.most:
            ahead = [index]
        self._read(readings, known, ahead, lambda places: self.inputs(h if places is EVERY else h[places], ahead).flatten(0, 1))

    def _read(
        self, readings: list[Reading | None], known: Tensor, columns: list[int], vectors: Callable[[Places], Tensor]
    ) -> None:
        """Read a head for some columns of the rows not known yet; vectors: of rows -> [columns * n, D]."""
        places = self._rest(known)
        rows = self._count_of(places)
        if not rows:
            return
        x, output = vectors(places), columns[-1] == self.last
        if readings is self.exact:
            found = probe(x, self.head.matrix, logits=output, last=rows)
        else:
            assert self.head.copy is not None
            found = probe(x, self.head.copy, logits=True)
        self._count(readings is self.exact, len(x))
        told = found.told[:2] / self.log_vocab
        if self.wants_margin:
            told = torch.cat([told, found.margin[None]])
        logits = found.logits if found.logits is None or len(found.logits) == len(x) else None
        for i, column in enumerate(columns):
            mine = slice(i * rows, (i + 1) * rows)
            z = logits[mine] if logits is not None else found.logits if column == self.last else None
            new, held = Reading(x[mine], told[:, mine], z), readings[column]
            if isinstance(places, Tensor):
                if held is None:  # not a number is equal to nothing, so that no vector is taken for one that was read
                    held = Reading(x.new_full((len(known), x.shape[1]), torch.nan), told.new_zeros(len(told), len(known)), None)
                new = held.with_rows(places, new)
            readings[column] = new

    def _rest(self, known: Tensor) -> Places:
        """The rows that are not known."""
        if known is self.none:
            return EVERY
        rest = _places(~known)
        return EVERY if len(rest) == len(known) else rest

    def _count_of(self, places: Places) -> int:
        return len(self.none) if isinstance(places, slice) else len(places)

    def _refine(self, places: Places, index: int) -> None:
        """Narrow the bound of some rows by the exact logits of their likeliest tokens."""
        found = self.cheap[index]
        assert self.head.copy is not None and found is not None and found.logits is not None
        better = refine(found.x[places], self.head.matrix, self.head.copy, found.logits[places])
        found.told = found.told.clone()
        found.told[:2, places] = better.told[:2] / self.log_vocab

    def _count(self, exact: bool, rows: int) -> None:
        passes, read = self.head.passes, -(-rows // ROWS)
        if exact:
            passes.exact, passes.rows = passes.exact + read, passes.rows + rows
        else:
            passes.cheap, passes.cheap_rows = passes.cheap + read, passes.cheap_rows + rows


@cache
def _masks(rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
    return torch.zeros(rows, dtype=torch.bool, device=device), torch.ones(rows, dtype=torch.bool, device=device)


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


def inputs_of(model: Amor) -> Callable[[Tensor, list[int]], Tensor]:
    """What the head is asked of a residual if no more block fires: blocks' inputs, and in the last column the output's vector."""

    def inputs(h: Tensor, columns: list[int]) -> Tensor:
        last = h if model.final_norm is None else model.final_norm(h)
        return torch.stack([last if c == len(model.blocks) else model.block_input(c, h) for c in columns])

    return inputs
