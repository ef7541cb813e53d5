"""Readings of the head in one decode step, each of them made once.

As long as no block fires, the inputs of all later blocks and the output vector are known in
advance. In decode the head is limited by memory bandwidth, so one pass over its weights reads all
of them (`joint`). A reading is keyed by column, row and residual version: column k is the input of
block k, the last column is the output vector, and a firing increments the version of its row. So a
row that fires is read again, and no other. Where gates read the output vector itself (`probe =
"final"`), all columns are the last one: one reading per row and version.
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
# residual [n, D], columns -> [columns, n, D] what they read of it if no further block fires
Inputs = Callable[[Tensor, list[int]], Tensor]


@dataclass(frozen=True)
class RowStats:
    """The reading of one vector."""

    entropy: float  # over log(vocab)
    margin: float = 0.0
    logits: Tensor | None = None  # [n, V] of the pass that read it, where logits were kept
    at: int = 0  # its row of these logits


@dataclass(frozen=True)
class BlockInputs:
    """The vectors of all rows when the gate of a block decides."""

    h: Tensor  # [R, D] the residual
    x: Tensor  # [R, D] the block's input
    probe: Tensor  # [R, D] the vector the head reads: x, or the output vector


@dataclass
class HeadReader:
    """Evidence for the gates of one step, and the logits at its end."""

    head: Head
    gates: Sequence[Gate]
    inputs: Inputs
    rows: int
    joint: bool = True  # read later columns in the same pass
    final: bool = False  # every gate reads the output vector, as it is before its block
    most: int = ROWS  # vectors per pass that cost little more than one: it waits for memory
    scorers: Scorers = field(default_factory=Scorers)
    readings: dict[tuple[int, int, int], RowStats] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.last = len(self.gates)
        self.versions = [0] * self.rows  # of each row's residual
        self.read_columns = [k for k, gate in enumerate(self.gates) if gate.needs] + [self.last]
        self.margins = any("margin" in gate.needs for gate in self.gates)
        self.log_vocab = math.log(self.head.matrix.outputs)
        for gate in self.gates:
            if "gain" in gate.needs:
                raise AmorError(
                    "the oracle gate needs the true next tokens, which decode does not have; "
                    "use another gate"
                )

    def follows(self, index: int) -> bool:
        """Whether a gate repeats the decision of the block before it."""
        return self.gates[index].decider is not self.gates[index]

    def fired(self, fires: Sequence[bool]) -> None:
        """The residual of the rows that fired is another from now on."""
        self.versions = [v + bool(fire) for v, fire in zip(self.versions, fires, strict=True)]

    def drop_ahead(self, fires: Sequence[bool]) -> None:
        """Drop readings made ahead of a block where some row does not fire.

        Of a row that fires, the reading after this block stands.
        """
        newest = [v + bool(fire) for v, fire in zip(self.versions, fires, strict=True)]
        for key in [key for key in self.readings if key[2] > newest[key[1]]]:
            del self.readings[key]

    def decide(
        self, index: int, vectors: BlockInputs, positions: Tensor
    ) -> tuple[list[bool], list[float]]:
        """Which rows fire at block `index`, and their scores."""
        gate = self.gates[index]
        scorer = None if gate.needs else self.scorers(gate, vectors.x.shape[1])
        if scorer is not None:
            out = vectors.x.new_empty(len(vectors.x), 1)
            scorer([vectors.x, out])
            scores = out[:, 0].tolist()
            return gate.fires(scores, positions.tolist()), scores
        if gate.needs == {"entropy"} and matches_forward(type(gate), "fires"):
            scores = [stats.entropy for stats in self._stats(index, vectors)]
            return gate.fires(scores, positions.tolist()), scores
        verdict = gate(self.evidence(index, vectors, positions))
        return verdict.fire.tolist(), verdict.score.tolist()

    def evidence(self, index: int, vectors: BlockInputs, positions: Tensor) -> Evidence:
        """The evidence of gate `index` for every row."""
        x = vectors.x
        if not self.gates[index].needs:
            return Evidence(x, positions)
        stats = self._stats(index, vectors)
        entropy, margin = torch.tensor(
            [[s.entropy for s in stats], [s.margin for s in stats]], device=x.device
        )
        return Evidence(x, positions, entropy, margin if self.margins else None)

    def read_ahead(self, first: int, vectors: Tensor) -> None:
        """Read columns from `first` on in one pass, each as it is if all blocks before it fire.

        vectors: [columns, R, D].
        """
        columns = list(range(first, self.last + 1))
        self._read(columns, list(range(self.rows)), vectors, firing=True)

    def output(self, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        """Logits [R, V] of the output vectors [R, D], and their entropies in nats [R] if read."""
        missing = self._missing(self.last)
        if len(missing) == self.rows:  # nothing else needs statistics of them
            return self.head.logits(hidden), None
        if missing:
            self._read([self.last], missing, hidden[missing][None])
        stats = [self.readings[key] for key in self._keys(self.last)]
        entropy = torch.tensor([s.entropy for s in stats], device=hidden.device) * self.log_vocab
        first = stats[0]
        logits = [s.logits for s in stats if s.logits is not None]
        if all(z is first.logits for z in logits) and [s.at for s in stats] == list(
            range(first.at, first.at + self.rows)
        ):
            return logits[0][first.at : first.at + self.rows], entropy
        return torch.stack([z[s.at] for z, s in zip(logits, stats, strict=True)]), entropy

    def _keys(self, column: int) -> list[tuple[int, int, int]]:
        """The keys of all rows' current readings of a column."""
        column = self.last if self.final and self.joint else column
        return [(column, row, version) for row, version in enumerate(self.versions)]

    def _missing(self, column: int) -> list[int]:
        """The rows whose current vector of a column has not been read."""
        return [row for row, key in enumerate(self._keys(column)) if key not in self.readings]

    def _stats(self, column: int, vectors: BlockInputs) -> list[RowStats]:
        """The readings of a column, read now where missing, with later ones if one pass serves."""
        missing = self._missing(column)
        if missing:
            every = len(missing) == self.rows
            columns = [c for c in self.read_columns if c >= column]
            if self.joint and not self.final and len(missing) * len(columns) <= self.most:
                x = self.inputs(vectors.h if every else vectors.h[missing], columns)
            else:
                columns, x = [column], (vectors.probe if every else vectors.probe[missing])[None]
            self._read(columns, missing, x)
        return [self.readings[key] for key in self._keys(column)]

    def _read(
        self, columns: list[int], rows: list[int], vectors: Tensor, firing: bool = False
    ) -> None:
        """One pass over the head for some columns of some rows; vectors [columns, rows, D].

        firing: the residual of each column is one firing newer than that of the column before.
        """
        count = vectors.shape[0] * len(rows)
        # any of the vectors may turn out to be the output's, or only those of the last column
        kept = count if self.final else len(rows) if columns[-1] == self.last else 0
        stats = self.head.read(vectors.flatten(0, 1), kept)
        entropy = _there(stats.entropy) / self.log_vocab
        margin = self._margin(stats) if self.margins else torch.zeros_like(entropy)
        numbers = zip(entropy.tolist(), margin.tolist(), strict=True)
        for i, column in enumerate(columns):
            for j, row in enumerate(rows):
                at = i * len(rows) + j - (count - kept)
                key = self.last if self.final and self.joint else column
                version = self.versions[row] + (i + 1 if firing else 0)
                self.readings[key, row, version] = RowStats(
                    *next(numbers), stats.logits if at >= 0 else None, at
                )

    def _margin(self, stats: HeadStats) -> Tensor:
        best, _ = _there(stats.topk)
        p = (best - _there(stats.logsumexp)[:, None]).exp()
        return p[:, 0] - p[:, 1]


class ReadAhead:
    """A HeadReader as the probe of the model's own forward, for calls of one token per row."""

    def __init__(self, reader: HeadReader, direct: DirectProbe):
        self.reader, self.direct = reader, direct

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
        if before is not None:
            self.reader.fired(before.fire[:, 0].tolist())
        probe = self.direct.model.probe_vector(h, x)[:, 0]
        vectors = BlockInputs(h[:, 0], x[:, 0], probe)
        evidence = self.reader.evidence(index, vectors, layout.positions[:, 0])
        entropy, margin = (
            None if t is None else t[:, None] for t in (evidence.entropy, evidence.margin)
        )
        return Evidence(x, layout.positions, entropy, margin, before=before)


def _there(value: T | None) -> T:
    assert value is not None
    return value
