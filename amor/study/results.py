"""The folder of a study, read: what each run measured, which learning rate a row is shown with, and every judgement of it."""

from __future__ import annotations

import statistics
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from amor import typed
from amor.errors import AmorError
from amor.records.run import Evaluated, Step
from amor.records.study import FOUND, JUDGED, LEDGER, AllRates, Decoded, Judgement, Ledger, Planned, Policy, Study
from amor.run import Run
from amor.study.paired import Grid


@dataclass(frozen=True)
class One:
    """A run and what was found of it."""

    planned: Planned
    run: Run

    @cached_property
    def valid(self) -> float | None:
        """The held-out loss at the end, as training measured it; None: it is not at its end, or not finite."""
        ends = [line for line in self.run.lines() if isinstance(line, Evaluated) and line.step == self.planned.steps]
        return ends[-1].valid.nll if ends else None

    @cached_property
    def gated(self) -> bool:
        """Whether its model has gates, as its first step tells."""
        return any(line.blocks for line in islice((line for line in self.run.lines() if isinstance(line, Step)), 1))

    @cached_property
    def found(self) -> dict[str, Any]:
        """Kind -> what was found, of those that are there."""
        held = {kind: self.run.folder / JUDGED / f"{kind}.json" for kind in FOUND}
        return {kind: _read(kind, path) for kind, path in held.items() if path.is_file()}


def _read(kind: str, path: Path) -> Any:
    held = typed.read(Judgement, path)
    if held.kind != kind:
        raise AmorError(f"{path}: kind: {held.kind!r}, where {kind!r} belongs")
    return typed.convert(FOUND[kind], held.found, str(path))


@dataclass(frozen=True)
class Results:
    """A study as far as it stands."""

    ledger: Ledger
    folder: Path

    @property
    def study(self) -> Study:
        return self.ledger.study

    @cached_property
    def runs(self) -> tuple[One, ...]:
        return tuple(One(planned, Run(self.folder / planned.folder)) for planned in self.ledger.runs)

    @cached_property
    def shown(self) -> dict[str, list[One]]:
        """Row -> its runs, one a seed, at the learning rate that is best for it."""
        best = chosen(self.runs)
        return {
            row: [one for one in self.runs if one.planned.row == row and one.planned.lr == best.get(row, one.planned.lr)]
            for row in self.ledger.rows
        }

    def of(self, row: str, kind: str) -> dict[int, Any]:
        """Seed -> what was found."""
        return {one.planned.seed: one.found[kind] for one in self.shown[row] if kind in one.found}

    def losses(self, row: str) -> Grid | None:
        return grid({seed: found.windows for seed, found in self.of(row, "loss").items()}, self.text(row, "loss"))

    def policy(self, row: str, name: str, rate: float | None = None) -> Grid | None:
        """The losses of a choice of tokens."""
        found = {seed: _policy(all_rates, name, rate) for seed, all_rates in self.of(row, "rates").items()}
        return grid({seed: one.windows for seed, one in found.items() if one is not None}, self.text(row, "rates"))

    def text(self, row: str, kind: str) -> frozenset[tuple[str, int, int, str]]:
        """What a row was judged on. The data of a study is one text, wherever it lay when it was read."""
        read = [found.data for found in self.of(row, kind).values()]
        return frozenset((self.ledger.data or one.source, one.context, one.windows, one.documents) for one in read)

    def saved(self, row: str, name: str, rate: float | None = None) -> Grid | None:
        """What a choice of tokens saves over never firing."""
        never, mine = self.policy(row, "never"), self.policy(row, name, rate)
        return None if never is None or mine is None else never.less(mine)

    def decode(self, row: str, rate: float | None) -> list[Decoded]:
        """How fast its runs write at a firing rate, one a seed; None: as they are."""
        return [one for found in self.of(row, "speed").values() for one in found.decode if one.rate == rate]

    @cached_property
    def rates(self) -> tuple[float, ...]:
        """Firing rates that policies were judged at."""
        asked = self.study.judge.rates
        return () if asked is None else asked.rates

    def missing(self) -> list[str]:
        """In words, what a table has no numbers of."""
        lacking = {row: dict.fromkeys(self._lacking(one) for one in ones) for row, ones in self.shown.items()}
        return [f"{row}: {', '.join(filter(None, each))}" for row, each in lacking.items() if any(each)]

    def _lacking(self, one: One) -> str:
        """A seed, and the kinds it lacks where it has others."""
        asked = self.study.judge.asked(one.gated)
        kinds = [kind for kind in asked if kind not in one.found]
        which = f" ({', '.join(kinds)})" if len(kinds) < len(asked) else ""
        return f"seed {one.planned.seed}{which}" if kinds else ""


def _policy(found: AllRates, name: str, rate: float | None) -> Policy | None:
    return next((one for one in found.policies if one.name == name and one.rate == rate), None)


def read(folder: str | Path) -> Results:
    folder = Path(folder)
    return Results(typed.read(Ledger, folder / LEDGER), folder)


def chosen(runs: Iterable[One]) -> dict[str, float | None]:
    """Of each row the learning rate whose mean held-out loss over seeds is the lowest, among those that most seeds have."""
    rows: dict[str, dict[float | None, list[float]]] = {}
    for one in runs:
        if one.valid is not None:
            rows.setdefault(one.planned.row, {}).setdefault(one.planned.lr, []).append(one.valid)
    return {row: _best(rates) for row, rates in rows.items()}


def _best(rates: dict[float | None, list[float]]) -> float | None:
    most = max(map(len, rates.values()))
    full = {lr: statistics.mean(losses) for lr, losses in rates.items() if len(losses) == most}
    return min(full, key=lambda lr: full[lr])


def grid(windows: dict[int, tuple[float, ...]], text: Hashable = None) -> Grid | None:
    """One number a seed and window; windows of different texts do not fit together."""
    if not windows:
        return None
    if len({len(each) for each in windows.values()}) > 1:
        raise AmorError("runs of one row were judged on different numbers of windows; run the study again, it judges anew")
    return Grid(tuple(windows), np.array(list(windows.values()), dtype=np.float64), text)
