"""Evaluation folders, read: the numbers of each model and of each document, and whether two may
stand side by side."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any, cast, get_args

import numpy as np

from amor import typed
from amor.errors import AmorError
from amor.records.evals import About, Data, Evaluation, GateCounts, Gates
from amor.study.paired import Scores
from amor.study.suites import SUITES, ScoreColumn, in_suite, suite

VARIANTS: tuple[Gates, ...] = get_args(Gates)
BULKY = {
    "doc",
    "target",
    "arguments",
    "resps",
    "filtered_resps",
}  # texts of a document, which no table needs
PHASES = ("prefill", "target", "decode")


@dataclass(frozen=True)
class SuiteResult:
    """One file: a suite of one model, its gates run in one way."""

    file: Path
    evaluation: Evaluation
    samples: dict[str, list[dict[str, Any]]] = field(
        default_factory=dict, repr=False
    )  # by task, read when needed
    scores: dict[ScoreColumn, Scores | None] = field(
        default_factory=dict, repr=False
    )  # made of these

    @property
    def gates(self) -> Gates:
        """How the gates were run."""
        return self.evaluation.amor.settings.gates

    def score(self, column: ScoreColumn) -> tuple[float, float | None] | None:
        """A number and its standard error, which is that of the documents where the file tells
        none."""
        known = self.evaluation.score(column.task, column.metric)
        if known is None:
            return None
        scores = None if known[1] else self.documents(column)
        return known[0], known[1] or (scores.error if scores else None)

    def documents(self, column: ScoreColumn) -> Scores | None:
        """The number of every document, or None where no file tells them."""
        if column not in self.scores:
            known = column.over is not None and self.samples_file(column.task).exists()
            self.scores[column] = self._documents(column) if known else None
        return self.scores[column]

    def _documents(self, column: ScoreColumn) -> Scores | None:
        values: dict[int, float] = {}
        for number, line in enumerate(self.lines(column.task), 1):
            where = f"{self.samples_file(column.task)}:{number}"
            value = line.get(column.metric)
            if (
                line.get("filter", "none") != "none"
                or value is None
                or (column.metric.isdecimal() and value == -1)
            ):
                continue  # the harness writes -1 for lengths that a document does not have
            name = line.get("doc_id")
            if not isinstance(name, int) or abs(name) >= 2**63:
                raise AmorError(f"{where}: doc_id: expected int of 64 bits, not {str(name)[:60]}")
            if not isinstance(value, int | float) or abs(value) > 1e300:
                raise AmorError(
                    f"{where}: {column.metric}: expected a number, not {str(value)[:60]!r}"
                )
            if name in values:
                raise AmorError(
                    f"{where}: doc_id {name} a second time; a document stands in one line"
                )
            values[name] = float(value)
        return self._agreeing(column, values) if values else None

    def _agreeing(self, column: ScoreColumn, values: dict[int, float]) -> Scores:
        ids = np.array(sorted(values), dtype=np.int64)
        scores = Scores(
            ids, np.array([values[name] for name in ids.tolist()]), column.over or "mean"
        )
        known, mean = (
            self.evaluation.score(column.task, column.metric),
            float(scores.score(scores.values.mean())),
        )
        if known is not None and not np.isclose(known[0], mean, rtol=1e-4, atol=1e-6):
            wrong = (
                f"{column.metric} of its {len(ids):,} documents is {mean:.6g}, where "
                f"{self.file} says {known[0]:.6g}"
            )
            raise AmorError(
                f"{self.samples_file(column.task)}: {wrong}; they are of two evaluations: "
                "evaluate again"
            )
        return scores

    def lines(self, task: str) -> list[dict[str, Any]]:
        """The lines of the samples file of a task, without the texts of documents."""
        if task not in self.samples:
            read = typed.read_lines(cast(type[dict[str, Any]], dict), self.samples_file(task))
            self.samples[task] = [
                {key: value for key, value in line.items() if key not in BULKY} for line in read
            ]
        return self.samples[task]

    def samples_file(self, task: str) -> Path:
        """The file that holds the numbers of every document of a task."""
        name, dot, rest = self.file.name.removesuffix(".json").partition(".")
        return self.file.with_name(f"samples_{name}_{task}{dot}{rest}.jsonl")

    def fired(self, phase: str | None = None) -> tuple[float, ...]:
        """The firing rate of every block over all tasks, in one phase or in all; nothing where no
        gate was asked."""
        asked = [counts for name, counts in self.counts() if phase in (None, name) and counts.fires]
        tokens = max(sum(counts.tokens for counts in asked), 1)
        return tuple(sum(fires) / tokens for fires in zip(*(counts.fires for counts in asked)))

    def counts(self) -> Iterator[tuple[str, GateCounts]]:
        """Phase and gate counts, of every task."""
        for phases in self.evaluation.amor.gates.values():
            yield from phases.items()

    @property
    def rate(self) -> float | None:
        """The share of tokens and blocks that fired, all phases together."""
        rates = self.fired()
        return sum(rates) / len(rates) if rates else None

    @property
    def documents_judged(self) -> int:
        """Documents of all tasks."""
        return sum(counts.get("effective", 0) for counts in self.evaluation.n_samples.values())


def file_name(suite: str, gates: Gates = "model", decode: bool = False) -> str:
    """The name of the file that `amor eval` writes."""
    return f"{suite}{'.decode' if decode else ''}{'' if gates == 'model' else f'.{gates}'}.json"


def suites_in(folder: Path, decode: bool = False) -> list[str]:
    """Those a folder holds, in the order in which they are known."""
    return [name for name in SUITES if (folder / file_name(name, decode=decode)).is_file()]


def shared_suites(folders: list[Path], decode: bool = False) -> list[str]:
    """Those that every folder holds."""
    held = [suites_in(folder, decode) for folder in folders]
    for folder, names in zip(folders, held):
        if not names:
            what = "no such folder" if not folder.is_dir() else "no evaluation in it"
            raise AmorError(
                f"{folder}: {what}; amor eval writes {file_name('common-sense', decode=decode)} "
                "and the like"
            )
    shared = [name for name in held[0] if all(name in names for names in held)]
    if not shared:
        known = "; ".join(
            f"{folder} has {', '.join(names)}" for folder, names in zip(folders, held)
        )
        raise AmorError(f"no suite that all have: {known}")
    return shared


def opened(folder: Path, name: str, gates: Gates = "model", decode: bool = False) -> SuiteResult:
    """One file of an evaluation folder."""
    suite(name)
    file = folder / file_name(name, gates, decode)
    if not file.is_file():
        there = suites_in(folder, decode)
        held = (
            f"it holds {', '.join(there)}"
            if there
            else "it holds no evaluation"
            if folder.is_dir()
            else "no such folder"
        )
        raise AmorError(f"{folder}: no {file.name}; {held}")
    return from_file(file)


def from_file(file: Path) -> SuiteResult:
    """What a file holds, which its name must say rightly: <suite>[.decode][.closed|.open].json."""
    judged = SuiteResult(file, typed.read(Evaluation, file))
    about = judged.evaluation.amor
    right = file_name(about.suite, about.settings.gates, about.settings.path == "decode")
    if file.name != right:
        held = (
            f"amor.suite and amor.settings say {about.suite}, gates {about.settings.gates}, "
            f"path {about.settings.path}"
        )
        raise AmorError(f"{file}: {held}, which is a file named {right}")
    _sound(file, about)
    return judged


def _sound(file: Path, about: About) -> None:
    """What the types cannot say: lists that belong together are as long, and no more tokens fire
    than there are."""
    if about.version != about.newest:
        raise AmorError(
            f"{file}: amor: of version {about.version}; this amor reads version {about.newest}"
        )
    blocks = None
    for task, phases in about.gates.items():
        for phase, counts in phases.items():
            key, count = f"amor.gates.{task}.{phase}.fires", len(counts.fires)
            if count and blocks not in (None, count):
                raise AmorError(
                    f"{file}: {key}: {count} blocks, where others have {blocks}; of one model "
                    "they are as many"
                )
            if any(fires > counts.tokens for fires in counts.fires):
                raise AmorError(
                    f"{file}: {key}: {max(counts.fires):,} of {counts.tokens:,} tokens; no more "
                    "can fire than there are"
                )
            blocks = count or blocks
    for name, curve in about.curves.items():
        sizes = {
            "prefix": curve.prefix,
            "bucket": curve.bucket,
            "errors": curve.errors,
            "rates": curve.rates or curve.prefix,
        }
        for key, values in sizes.items():
            if len(values) != len(curve.lengths):
                raise AmorError(
                    f"{file}: amor.curves.{name}.{key}: {len(values)} numbers for "
                    f"{len(curve.lengths)} lengths"
                )
        if len({len(rates) for rates in curve.rates}) > 1:
            raise AmorError(f"{file}: amor.curves.{name}.rates: not as many blocks at every length")


def variants(folder: Path, name: str, decode: bool = False) -> list[SuiteResult]:
    """The model as it is, and with gates closed and open where that was evaluated."""
    others = [
        gates for gates in VARIANTS[1:] if (folder / file_name(name, gates, decode)).is_file()
    ]
    return [opened(folder, name, gates, decode) for gates in (VARIANTS[0], *others)]


def side_by_side(rows: list[SuiteResult]) -> list[SuiteResult]:
    """The same rows, if what was asked of them is the same: else one line that names what
    differs."""
    for a, b in combinations(rows, 2):
        one, other = a.evaluation.amor, b.evaluation.amor
        for key, mine, theirs in (
            ("limit", one.settings.limit, other.settings.limit),
            ("harness", one.settings.harness, other.settings.harness),
            ("path", one.settings.path, other.settings.path),
        ):
            if mine != theirs:
                raise AmorError(
                    _differ(a, b, f"amor.settings.{key}", mine or "none", theirs or "none")
                )
        for task in one.data.keys() & other.data.keys():
            mine, theirs = _print(one.data[task], other.data[task])
            if mine != theirs:
                raise AmorError(_differ(a, b, f"amor.data.{task}", mine, theirs))
    return rows


def _print(a: Data, b: Data) -> tuple[str, str]:
    """What tells data apart: the fingerprint, or where and how much where there is none (a data set
    of the hub)."""
    if a.sha256 and b.sha256:
        return a.sha256[:12], b.sha256[:12]
    return f"{a.rows:,} rows of {a.source}", f"{b.rows:,} rows of {b.source}"


def _differ(a: SuiteResult, b: SuiteResult, key: str, mine: object, theirs: object) -> str:
    return (
        f"{a.file} and {b.file} cannot stand side by side: {key} is {mine} in one and "
        f"{theirs} in the other; evaluate both alike"
    )


def paired(a: SuiteResult, b: SuiteResult, column: ScoreColumn) -> tuple[Scores, Scores] | None:
    """The documents of both, which must be the same; None where one of them tells none."""
    mine, theirs = a.documents(column), b.documents(column)
    if mine is None or theirs is None:
        return None
    if not np.array_equal(mine.ids, theirs.ids):
        only = sorted(set(mine.ids.tolist()) ^ set(theirs.ids.tolist()))
        files = f"{a.samples_file(column.task)} and {b.samples_file(column.task)}"
        raise AmorError(
            f"{files}: {len(only):,} documents stand in only one of them (doc_id {only[0]} is the "
            "first)"
        )
    return mine, theirs


def labels(rows: list[SuiteResult]) -> list[str]:
    """A name per row: that of its model, with its folder where two have the same, and how its gates
    were run."""
    names = [" ".join(row.evaluation.amor.model.name.split()) for row in rows]
    folders = [
        {row.file.parent for row, other in zip(rows, names) if other == name} for name in names
    ]
    marks = ["" if row.gates == "model" else f", {row.gates}" for row in rows]
    return [
        f"{name} ({row.file.parent}){mark}" if len(where) > 1 else f"{name}{mark}"
        for row, name, where, mark in zip(rows, names, folders, marks)
    ]


def columns(name: str, rows: Iterable[SuiteResult]) -> tuple[ScoreColumn, ...]:
    """Those of the suite; needles also have those of every task and length that was measured."""
    known = suite(name).columns
    if name != "niah":
        return known
    tasks = in_suite(name)
    for row in rows:
        for task, metrics in row.evaluation.results.items():
            lengths = [key.removesuffix(",none") for key in metrics if key.endswith(",none")]
            made = [
                tasks[task].column_at(int(length))
                for length in lengths
                if task in tasks and length.isdecimal()
            ]
            known += tuple(
                column for column in made if column and column not in known and row.score(column)
            )
    return tuple(sorted(known, key=lambda column: (column.task, int(column.metric))))
