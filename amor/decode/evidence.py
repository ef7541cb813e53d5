"""Evidence of gates in one decode step: every reading of the head is made once, several together.

As long as no block fires, the columns of later blocks and the output vector are known in advance.
In decode the head is limited by memory bandwidth, so one pass over its weights reads all of them
(`joint`). A reading is keyed by column, row and residual version: a firing increments the version
of its row. So a row that fires is read again, and no other. Where gates read the output vector
itself, all columns are the last one: one reading per row and version.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from amor.decode.head import Head
from amor.decode.scores import Scorers
from amor.errors import AmorError
from amor.gates.base import Evidence, Gate, Verdict, matches_forward
from amor.gates.evidence import FROM_LOGITS, HEAD_EVIDENCE, head_evidence
from amor.ops.product import ROWS


class Columns(Protocol):
    """Blocks of a pass with one token per row."""

    def columns(self, h: Any, which: Sequence[int], rows: list[int] | None) -> Tensor:
        """[columns, n, D] of the residual of some rows (None: all)."""


def most_vectors(columns: int) -> int:
    """The number of vectors up to which one pass over the head reads several columns together.

    Eight vectors cost little more than one, for a pass waits for memory. With several rows some row
    fires at nearly every token, and its later columns are read again: one more pass. So two columns
    are read together only where the pass is that small; of more columns there is more to save.
    """
    return ROWS * (columns if columns > 2 else 1)


@dataclass(frozen=True)
class RowStats:
    """The reading of one vector."""

    values: dict[str, float]  # evidence by name
    entropy: float  # in nats
    logits: Tensor | None = None  # [n, V] of the pass that read it, where logits were kept
    at: int = 0  # its row of these logits


@dataclass
class JointEvidence:
    """Decides for the gates of one step, and gives the logits at its end."""

    blocks: Columns
    head: Head
    gates: Sequence[Gate]
    positions: Tensor  # [R] of the tokens
    probe_output: bool  # every gate reads the output vector, as it is before its block
    joint: bool = True  # read later columns in the same pass
    scorers: Scorers | None = None  # compiled scores of gates; None: gates run in torch
    readings: dict[tuple[int, int, int], RowStats] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.last, self.rows = len(self.gates), len(self.positions)
        self.versions = [0] * self.rows  # of each row's residual
        self.read_columns = [k for k, gate in enumerate(self.gates) if gate.needs] + [self.last]
        self.names = frozenset().union(*(gate.needs for gate in self.gates))
        if not self.names <= HEAD_EVIDENCE.keys():
            raise AmorError(
                "the oracle gate needs the true next tokens, which decode does not have; "
                "use another gate"
            )

    def follows(self, index: int) -> bool:
        """Whether a gate repeats the decision of the block before it."""
        return self.gates[index].decider is not self.gates[index]

    def decide(self, index: int, gate: Gate, h: Any, x: Tensor, before: Verdict | None) -> Verdict:
        """The decision on the token of every row; x [R, D] or [R, 1, D], and so the decision."""
        self.fired(before)
        if self.follows(index) and before is not None:
            return before
        flat = x.flatten(0, -2)
        scorer = None if gate.needs or self.scorers is None else self.scorers(gate, flat.shape[1])
        if scorer is not None:
            out = flat.new_empty(self.rows, 1)
            scorer([flat, out])
            scores = out[:, 0].tolist()
        elif gate.needs == {"entropy"} and matches_forward(type(gate), "fires"):
            scores = [stats.values["entropy"] for stats in self._stats(index, h)]
        else:
            verdict = gate(self._evidence(index, gate, h, flat))
            return Verdict(verdict.fire.view(x.shape[:-1]), verdict.score.view(x.shape[:-1]))
        fires = gate.fires(scores, self.positions.tolist())
        fire = torch.tensor(fires, device=x.device).view(x.shape[:-1])
        return Verdict(fire, torch.tensor(scores, device=x.device).view(x.shape[:-1]))

    def _evidence(self, index: int, gate: Gate, h: Any, x: Tensor) -> Evidence:
        names = sorted(gate.needs)
        stats = self._stats(index, h) if names else []
        values: dict[str, Any] = {
            name: torch.tensor([s.values[name] for s in stats], device=x.device) for name in names
        }
        return Evidence(x, self.positions, **values, before=None)

    def fired(self, before: Verdict | None) -> None:
        """The residual of the rows that fired is another from now on."""
        if before is not None:
            fires = before.fire.flatten().tolist()
            self.versions = [v + bool(fire) for v, fire in zip(self.versions, fires, strict=True)]

    def output(self, hidden: Tensor, last: Verdict | None) -> tuple[Tensor, Tensor | None]:
        """Logits [R, V] of the output vectors [R, D], and their entropies in nats [R] if read.

        last: the decision of the last block.
        """
        self.fired(last)
        missing = self._missing(self.last)
        if len(missing) == self.rows:  # nothing else needs statistics of them
            return self.head.logits(hidden), None
        if missing:
            self._read([self.last], missing, hidden[missing][None])
        stats = [self.readings[key] for key in self._keys(self.last)]
        entropy = torch.tensor([s.entropy for s in stats], device=hidden.device)
        first = stats[0]
        logits = [s.logits for s in stats if s.logits is not None]
        if all(z is first.logits for z in logits) and [s.at for s in stats] == list(
            range(first.at, first.at + self.rows)
        ):
            return logits[0][first.at : first.at + self.rows], entropy
        return torch.stack([z[s.at] for z, s in zip(logits, stats, strict=True)]), entropy

    def _keys(self, column: int) -> list[tuple[int, int, int]]:
        """The keys of all rows' current readings of a column."""
        column = self.last if self.probe_output and self.joint else column
        return [(column, row, version) for row, version in enumerate(self.versions)]

    def _missing(self, column: int) -> list[int]:
        """The rows whose current vector of a column has not been read."""
        return [row for row, key in enumerate(self._keys(column)) if key not in self.readings]

    def _stats(self, column: int, h: Any) -> list[RowStats]:
        """The readings of a column, read now where missing, with later ones if one pass serves."""
        missing = self._missing(column)
        if missing:
            columns = [c for c in self.read_columns if c >= column]
            together = len(missing) * len(columns) <= most_vectors(len(columns))
            if self.probe_output or not self.joint or not together:
                columns = [column]
            vectors = [self.last] if self.probe_output else columns
            some = None if len(missing) == self.rows else missing
            self._read(columns, missing, self.blocks.columns(h, vectors, some))
        return [self.readings[key] for key in self._keys(column)]

    def _read(self, columns: list[int], rows: list[int], vectors: Tensor) -> None:
        """One pass over the head for some columns of some rows; vectors [columns, rows, D]."""
        count = vectors.shape[0] * len(rows)
        # any of the vectors may turn out to be the output's, or only those of the last column
        every = self.probe_output or bool(self.names & FROM_LOGITS)
        kept = count if every else len(rows) if columns[-1] == self.last else 0
        stats = self.head.read(vectors.flatten(0, 1), kept)
        values = head_evidence(stats, self.head.matrix.outputs, self.names)
        numbers = {name: value.tolist() for name, value in values.items()}
        assert stats.entropy is not None
        entropy = stats.entropy.tolist()
        for i, column in enumerate(columns):
            for j, row in enumerate(rows):
                n = i * len(rows) + j
                at = n - (count - kept)
                key = self.last if self.probe_output and self.joint else column
                self.readings[key, row, self.versions[row]] = RowStats(
                    {name: value[n] for name, value in numbers.items()},
                    entropy[n],
                    stats.logits if at >= 0 else None,
                    at,
                )
