"""The folder of a study, read: every measurement of its runs, and which learning rate each row is
shown with."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from amor import typed
from amor.errors import AmorError
from amor.records.run import Evaluated, Step
from amor.run import Run
from amor.study.definition import (
    JUDGED,
    LEDGER,
    Measurement,
    PlannedRun,
    Study,
    StudyLedger,
    find_measure,
)
from amor.study.paired import Grid


@dataclass(frozen=True)
class StudyRun:
    """A run of a study, and what was measured of it."""

    planned: PlannedRun
    run: Run
    kinds: tuple[str, ...] = ()  # that the study asks for

    @cached_property
    def valid(self) -> float | None:
        """The held-out loss at the last step, as training measured it; None: it is not at its end,
        or not finite."""
        evals = [line for line in self.run.lines() if isinstance(line, Evaluated)]
        ends = [line.valid.nll for line in evals if line.step == self.planned.steps]
        return ends[-1] if ends else None

    @cached_property
    def gated(self) -> bool:
        """Whether its model has gates, by its first step."""
        steps = (line for line in self.run.lines() if isinstance(line, Step))
        return any(line.blocks for line in islice(steps, 1))

    @cached_property
    def results(self) -> dict[str, Any]:
        """Kind -> result, of the measurements that are there."""
        files = {kind: self.run.folder / JUDGED / f"{kind}.json" for kind in self.kinds}
        return {kind: _read(kind, path) for kind, path in files.items() if path.is_file()}


def _read(kind: str, path: Path) -> Any:
    file = typed.read(Measurement, path)
    if file.kind != kind:
        raise AmorError(f"{path}: kind: {file.kind!r}, where {kind!r} belongs")
    return typed.convert(find_measure(kind).Result, file.result, str(path))


@dataclass(frozen=True)
class Results:
    """A study as far as it is measured."""

    ledger: StudyLedger
    folder: Path

    @property
    def study(self) -> Study:
        """The study as it was run."""
        return self.ledger.study

    def options(self, kind: str) -> Any:
        """The options that a kind is measured with, which the study must ask for."""
        return self.study.measurements()[kind]

    @cached_property
    def runs(self) -> tuple[StudyRun, ...]:
        """Every run of the study, measured or not."""
        kinds, planned = tuple(self.study.measurements()), self.ledger.runs
        return tuple(StudyRun(each, Run(self.folder / each.folder), kinds) for each in planned)

    @cached_property
    def shown(self) -> dict[str, list[StudyRun]]:
        """Row -> its runs, one per seed, at the learning rate that is best for it."""
        best = best_learning_rates(self.runs)
        shown: dict[str, list[StudyRun]] = {row: [] for row in self.ledger.rows}
        for run in self.runs:
            if run.planned.lr == best.get(run.planned.row, run.planned.lr):
                shown[run.planned.row].append(run)
        return shown

    def of(self, row: str, kind: str) -> dict[int, Any]:
        """Seed -> result."""
        runs = self.shown[row]
        return {run.planned.seed: run.results[kind] for run in runs if kind in run.results}

    def by_row(self, kind: str) -> dict[str, list[Any]]:
        """Row -> a result per seed, of the rows that have any, in the order of the study."""
        each = {row: list(self.of(row, kind).values()) for row in self.ledger.rows}
        return {row: measured for row, measured in each.items() if measured}

    def grid(self, row: str, kind: str, windows: dict[int, tuple[float, ...]]) -> Grid | None:
        """Numbers by seed and window, with the text they are of: windows of different texts are not
        compared."""
        if not windows:
            return None
        if len({len(each) for each in windows.values()}) > 1:
            wrong = "runs of one row were judged on different numbers of windows"
            raise AmorError(f"{wrong}; run the study again, it judges anew")
        texts = [each.data for each in self.of(row, kind).values()]
        # the data of a study is one text, wherever it lay when it was read
        data = self.ledger.data
        text = frozenset((data or t.source, t.context, t.windows, t.documents) for t in texts)
        return Grid(tuple(windows), np.array(list(windows.values()), dtype=np.float64), text)

    def missing(self) -> list[str]:
        """One line per row: which seeds lack which measurements."""
        lacking = {row: dict.fromkeys(map(self._lacking, each)) for row, each in self.shown.items()}
        named = {row: ", ".join(filter(None, seeds)) for row, seeds in lacking.items()}
        return [f"{row}: {seeds}" for row, seeds in named.items() if seeds]

    def _lacking(self, run: StudyRun) -> str:
        """A seed, and the kinds it lacks where it has others."""
        asked = self.study.measurements(run.gated)
        kinds = [kind for kind in asked if kind not in run.results]
        which = f" ({', '.join(kinds)})" if len(kinds) < len(asked) else ""
        return f"seed {run.planned.seed}{which}" if kinds else ""


def read(folder: str | Path) -> Results:
    """Open the folder of a study."""
    folder = Path(folder)
    return Results(typed.read(StudyLedger, folder / LEDGER), folder)


def best_learning_rates(runs: Iterable[StudyRun]) -> dict[str, float | None]:
    """Of each row the learning rate whose mean held-out loss over seeds is the lowest, among those
    that most seeds have."""
    rows: dict[str, dict[float | None, list[float]]] = {}
    for run in runs:
        if run.valid is not None:
            rows.setdefault(run.planned.row, {}).setdefault(run.planned.lr, []).append(run.valid)
    return {row: _best(rates) for row, rates in rows.items()}


def _best(rates: dict[float | None, list[float]]) -> float | None:
    most = max(map(len, rates.values()))
    full = {lr: statistics.mean(losses) for lr, losses in rates.items() if len(losses) == most}
    return min(full, key=lambda lr: full[lr])
