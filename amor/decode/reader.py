"""What the head says in one step: read once for every probe to come, and again only for rows that fired.

Block k's input and the output's vector are known in advance as long as no block fires. In decode the head is limited by the
memory it is read from, so one pass serves all of them (`joint`). A reading belongs to the vector it was made of: it stands
while that vector's bits stand, so a row that fires is read again and no other. Column k is block k's input, the last column the
output's vector. Where gates ask about the output's own vector (`final`), what was said of it in one column is said in all: one
vector a row is read, and again after a firing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from amor.decode.head import Head
from amor.decode.scores import Scorers
from amor.errors import AmorError
from amor.gates.base import Evidence, Gate, Verdict, matches_forward
from amor.layout import Layout
from amor.models.probe import DirectProbe, Residuals
from amor.ops.head.reference import HeadStats
from amor.ops.product import ROWS

T = TypeVar("T")
Inputs = Callable[[Tensor, list[int]], Tensor]  # residual [n, D], columns -> [columns, n, D] if no more block fires


@dataclass(frozen=True)
class RowStats:
    """What a head said of one vector."""

    entropy: float  # over log(vocab)
    margin: float = 0.0
    logits: Tensor | None = None  # [V] where they were wanted


@dataclass
class Column:
    x: Tensor  # [R, D] the vectors that were read
    rows: list[RowStats | None]  # None for rows that were not
    logits: Tensor | None = None  # [R, V] where the exact head was read for all rows at once

    def stale(self, x: Tensor) -> list[int]:
        """The rows of which nothing is known, for these vectors."""
        if self.x.data_ptr() == x.data_ptr() or torch.equal(
            self.x, x
        ):  # the same memory holds the same vectors while a step lasts
            return [row for row, said in enumerate(self.rows) if said is None]
        same = (self.x == x).all(-1).tolist()
        return [row for row, said in enumerate(self.rows) if said is None or not same[row]]


@dataclass(frozen=True)
class Asked:
    """What there is of all rows when a gate decides."""

    h: Tensor  # [R, D] the residual
    x: Tensor  # [R, D] what the block reads of it
    vector: Tensor  # [R, D] what the head is asked about: x, or the output's vector


@dataclass
class HeadReader:
    """The readings of one step."""

    head: Head
    gates: Sequence[Gate]
    inputs: Inputs
    joint: bool = True
    final: bool = False  # every gate asks about the output's vector, as it is before its block
    most: int = ROWS  # vectors that one pass serves at little more than the price of one
    scorers: Scorers = field(default_factory=Scorers)
    columns: dict[int, Column] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.last = len(self.gates)
        self.asked = [index for index, gate in enumerate(self.gates) if gate.needs] + [self.last]
        self.margins = any("margin" in gate.needs for gate in self.gates)
        self.log_vocab = math.log(self.head.matrix.outputs)
        for gate in self.gates:
            if "gain" in gate.needs:
                raise AmorError("the oracle gate needs the true next tokens, which a step does not know; use another gate")

    def follows(self, index: int) -> bool:
        """Whether a gate decides as the one before it did, whatever that was."""
        return self.gates[index].decider is not self.gates[index]

    def decide(self, index: int, asked: Asked, positions: Tensor) -> tuple[list[bool], list[float]]:
        """Which rows fire at block `index`, and what its gate looked at."""
        gate = self.gates[index]
        scorer = None if gate.needs else self.scorers(gate, asked.x.shape[1])
        if scorer is not None:
            told = asked.x.new_empty(len(asked.x), 1)
            scorer([asked.x, told])
            scores = told[:, 0].tolist()
            return [bool(fire) for fire in _there(gate.decide_interval(scores, scores, positions.tolist()))], scores
        if gate.needs == {"entropy"} and matches_forward(type(gate), "decide_interval"):
            return self._by_entropy(index, asked, positions.tolist())
        verdict = gate(self.evidence(index, asked, positions))
        return verdict.fire.tolist(), verdict.score.tolist()

    def evidence(self, index: int, asked: Asked, positions: Tensor) -> Evidence:
        """What gate `index` may know of its rows, from the exact head."""
        x = asked.x
        if not self.gates[index].needs:
            return Evidence(x, positions)
        self._know(index, asked.vector, asked.h)
        said = self._rows(index)
        entropy, margin = torch.tensor([[s.entropy for s in said], [s.margin for s in said]], device=x.device)
        return Evidence(x, positions, entropy, margin if self.margins else None)

    def _by_entropy(self, index: int, asked: Asked, positions: list[int]) -> tuple[list[bool], list[float]]:
        self._know(index, asked.vector, asked.h)
        scores = [s.entropy for s in self._rows(index)]
        return [bool(fire) for fire in _there(self.gates[index].decide_interval(scores, scores, positions))], scores

    def foretell(self, first: int, vectors: Tensor) -> None:
        """Read the head once for columns from `first` on, [columns, R, D], as they will be if the blocks before each fire."""
        rows = vectors.shape[1]
        self._read(list(range(first, self.last + 1)), list(range(rows)), rows, vectors)

    def output(self, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        """Of the output's vectors [R, D]: logits [R, V], entropy in nats [R] if known."""
        if len(self._unknown(self.last, hidden)) == len(hidden):  # no gate is to be told of it
            return self.head.logits(hidden), None
        self._know(self.last, hidden, None)
        said = self._rows(self.last)
        entropy = torch.tensor([s.entropy for s in said], device=hidden.device) * self.log_vocab
        whole = self.columns[self.last].logits
        return torch.stack([_there(s.logits) for s in said]) if whole is None else whole, entropy

    def _know(self, column: int, x: Tensor, h: Tensor | None) -> None:
        """Read what is not known of rows x [R, D] of a column; with the residual h also those to come, where one pass serves."""
        stale = self._unknown(column, x)
        if not stale:
            return
        wanted = [c for c in self.asked if c >= column]
        every = len(stale) == len(x)
        if h is not None and self.joint and not self.final and len(stale) * len(wanted) <= self.most:
            vectors = self.inputs(h if every else h[stale], wanted)
        else:
            wanted, vectors = [column], (x if every else x[stale])[None]
        self._read(wanted, stale, len(x), vectors)

    def _unknown(self, column: int, x: Tensor) -> list[int]:
        """The rows of a column of which nothing is known, for these vectors; with `final`, in no other column either."""
        here = self.columns.get(column)
        stale = list(range(len(x))) if here is None else here.stale(x)
        if not stale or not (self.final and self.joint):
            return stale
        for known in list(self.columns.values()):
            other = set(known.stale(x))
            rows = [row for row in stale if row not in other]
            if len(rows) == len(x):
                self.columns[column] = known
            elif rows:
                here = self.columns.get(column) or Column(unread(x, len(x)), [None] * len(x))
                vectors, said = here.x.clone(), list(here.rows)
                vectors[rows] = x[rows]
                for row in rows:
                    said[row] = known.rows[row]
                self.columns[column] = Column(vectors, said)
            stale = [row for row in stale if row in other]
        return stale

    def _read(self, columns: list[int], rows: list[int], of: int, vectors: Tensor) -> None:
        """One pass for some columns of some rows `of` all; vectors [columns, rows, D]."""
        flat, n = vectors.flatten(0, 1), len(rows)
        # any of the vectors may turn out to be the output's, or the last column's alone
        last = len(flat) if self.final else n if columns[-1] == self.last else 0
        self._keep(columns, rows, of, vectors, self.head.read(flat, last))

    def _keep(self, columns: list[int], rows: list[int], of: int, vectors: Tensor, found: HeadStats) -> None:
        """Take in one pass: found holds [columns * rows] numbers, and logits of the last of them."""
        n, count = len(rows), vectors.shape[0] * len(rows)
        entropy = (_there(found.entropy) / self.log_vocab).tolist()
        margin = self._margins(found) if self.margins else [0.0] * count
        first = count if found.logits is None else count - len(found.logits)  # the first vector whose logits are kept
        for i, column in enumerate(columns):
            here = self.columns.get(column)
            said: list[RowStats | None] = [None] * of if here is None else list(here.rows)
            z = None if i * n < first else _there(found.logits)[i * n - first : (i + 1) * n - first]
            for j, row in enumerate(rows):
                at = i * n + j
                said[row] = RowStats(entropy[at], margin[at], None if z is None else z[j])
            if n == of:
                self.columns[column] = Column(vectors[i], said, z)
            else:
                x = unread(vectors, of) if here is None else here.x.clone()
                x[rows] = vectors[i]
                self.columns[column] = Column(x, said)

    def _margins(self, found: HeadStats) -> list[float]:
        best, _ = _there(found.topk)
        p = (best - _there(found.logsumexp)[:, None]).exp()
        return (p[:, 0] - p[:, 1]).tolist()

    def _rows(self, column: int) -> list[RowStats]:
        return [_there(said) for said in self.columns[column].rows]


class ReadAhead:
    """A reader as a strategy for the model's own forward: one token a row is read ahead, longer calls a block at a time."""

    def __init__(self, reader: HeadReader, plain: DirectProbe):
        self.reader, self.plain = reader, plain

    @torch.no_grad()
    def __call__(
        self,
        index: int,
        h: Tensor,
        x: Tensor,
        layout: Layout,
        needs: frozenset[str],
        opened: Residuals,
        before: Verdict | None = None,
    ) -> Evidence:
        if x.shape[1] > 1 or layout.valid is not None:
            return self.plain(index, h, x, layout, needs, opened, before)
        asked = Asked(h[:, 0], x[:, 0], self.plain.model.asked(h, x)[:, 0])
        seen = self.reader.evidence(index, asked, layout.positions[:, 0])
        entropy, margin = (None if t is None else t[:, None] for t in (seen.entropy, seen.margin))
        return Evidence(x, layout.positions, entropy, margin, before=before)


def unread(like: Tensor, rows: int) -> Tensor:
    """Vectors [rows, D] that no vector is equal to: not a number is not even equal to itself."""
    return like.new_full((rows, like.shape[-1]), torch.nan)


def _there(value: T | None) -> T:
    assert value is not None
    return value
