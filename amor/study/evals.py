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
from amor.eval.tasks import SUITES, ScoreColumn, in_suite, suite
from amor.records.evals import About, Data, Evaluation, Gates
from amor.study.paired import Scores

VARIANTS: tuple[Gates, ...] = get_args(Gates)
# texts of a document, which no table needs
BULKY = {"doc", "target", "arguments", "resps", "filtered_resps"}
PHASES = ("prefill", "target", "decode")


@dataclass(frozen=True)
class SuiteResult:
    """One file: a suite of one model, its gates run in one way."""

    file: Path
    evaluation: Evaluation
    # by task, read when needed
    samples: dict[str, list[dict[str, Any]]] = field(default_factory=dict, repr=False)
    # made of these
    scores: dict[ScoreColumn, Scores | None] = field(default_factory=dict, repr=False)

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
            # the harness writes -1 for lengths that a document does not have
            lacks = value is None or (column.metric.isdecimal() and value == -1)
            if lacks or line.get("filter", "none") != "none":
                continue
            name = line.get("doc_id")
            if not isinstance(name, int) or abs(name) >= 2**63:
                raise AmorError(f"{where}: doc_id: expected int of 64 bits, not {str(name)[:60]}")
            if not isinstance(value, int | float) or abs(value) > 1e300:
                shown = f"expected a number, not {str(value)[:60]!r}"
                raise AmorError(f"{where}: {column.metric}: {shown}")
            if name in values:
                twice = f"doc_id {name} a second time; a document stands in one line"
                raise AmorError(f"{where}: {twice}")
            values[name] = float(value)
        return self._agreeing(column, values) if values else None

    def _agreeing(self, column: ScoreColumn, values: dict[int, float]) -> Scores:
        ids = np.array(sorted(values), dtype=np.int64)
        ordered = np.array([values[name] for name in ids.tolist()])
        scores = Scores(ids, ordered, column.over or "mean")
        known, mean = self.evaluation.score(column.task, column.metric), scores.mean
        if known is not None and not np.isclose(known[0], mean, rtol=1e-4, atol=1e-6):
            wrong = (
                f"{column.metric} of its {len(ids):,} documents is {mean:.6g}, where "
                f"{self.file} says {known[0]:.6g}"
            )
            which = "they are of two evaluations: evaluate again"
            raise AmorError(f"{self.samples_file(column.task)}: {wrong}; {which}")
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
        phases = [each for task in self.evaluation.amor.gates.values() for each in task.items()]
        asked = [counts for name, counts in phases if phase in (None, name) and counts.fires]
        tokens = max(sum(counts.tokens for counts in asked), 1)
        return tuple(sum(fires) / tokens for fires in zip(*(counts.fires for counts in asked)))

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
            written = file_name("common-sense", decode=decode)
            raise AmorError(f"{folder}: {what}; amor eval writes {written} and the like")
    shared = [name for name in held[0] if all(name in names for names in held)]
    if not shared:
        known = (f"{folder} has {', '.join(names)}" for folder, names in zip(folders, held))
        raise AmorError(f"no suite that all have: {'; '.join(known)}")
    return shared


def opened(folder: Path, name: str, decode: bool = False) -> SuiteResult:
    """The file of an evaluation folder in which the model's gates are as they are."""
    suite(name)
    file = folder / file_name(name, decode=decode)
    if not file.is_file():
        there = ", ".join(suites_in(folder, decode)) or "no evaluation"
        held = f"it holds {there}" if folder.is_dir() else "no such folder"
        raise AmorError(f"{folder}: no {file.name}; {held}")
    return from_file(file)


def from_file(file: Path) -> SuiteResult:
    """What a file holds, which its name must say rightly: <suite>[.decode][.closed|.open].json."""
    judged = SuiteResult(file, typed.read(Evaluation, file))
    about = judged.evaluation.amor
    right = file_name(about.suite, about.settings.gates, about.settings.path == "decode")
    if file.name != right:
        asked = f"{about.suite}, gates {about.settings.gates}, path {about.settings.path}"
        held = f"amor.suite and amor.settings say {asked}"
        raise AmorError(f"{file}: {held}, which is a file named {right}")
    for key, wrong in _contradictions(about):
        raise AmorError(f"{file}: amor{key}: {wrong}")
    return judged


def _contradictions(about: About) -> Iterator[tuple[str, str]]:
    """Key and fault, where the types cannot say it: lists that belong together are as long, and no
    more tokens fire than there are."""
    if about.version != about.newest:
        yield "", f"of version {about.version}; this amor reads version {about.newest}"
    blocks = None
    for task, phases in about.gates.items():
        for phase, counts in phases.items():
            key, count = f".gates.{task}.{phase}.fires", len(counts.fires)
            if count and blocks not in (None, count):
                others = f"where others have {blocks}; of one model they are as many"
                yield key, f"{count} blocks, {others}"
            if (most := max(counts.fires, default=0)) > counts.tokens:
                fired = f"{most:,} of {counts.tokens:,} tokens"
                yield key, f"{fired}; no more can fire than there are"
            blocks = count or blocks
    for name, curve in about.curves.items():
        for key in ("prefix", "bucket", "errors", "rates"):
            count = len(getattr(curve, key))
            if count != len(curve.lengths) and (count or key != "rates"):
                yield f".curves.{name}.{key}", f"{count} numbers for {len(curve.lengths)} lengths"
        if len({len(rates) for rates in curve.rates}) > 1:
            yield f".curves.{name}.rates", "not as many blocks at every length"


def variants(model: SuiteResult) -> list[SuiteResult]:
    """The model as it is, and with gates closed and open where that was evaluated."""
    folder, about = model.file.parent, model.evaluation.amor
    names = [file_name(about.suite, g, about.settings.path == "decode") for g in VARIANTS[1:]]
    return [model, *(from_file(folder / name) for name in names if (folder / name).is_file())]


def check_comparable(rows: list[SuiteResult]) -> None:
    """Refuse rows that were not asked the same, in one line that names what differs."""
    for a, b in combinations(rows, 2):
        one, other = a.evaluation.amor, b.evaluation.amor
        asked = {
            f"settings.{key}": tuple(getattr(each.settings, key) or "none" for each in (one, other))
            for key in ("limit", "harness", "path")
        }
        for task in one.data.keys() & other.data.keys():
            asked[f"data.{task}"] = _identities(one.data[task], other.data[task])
        for key, (mine, theirs) in asked.items():
            if mine != theirs:
                differs = f"amor.{key} is {mine} in one and {theirs} in the other"
                apart = f"{a.file} and {b.file} cannot stand side by side"
                raise AmorError(f"{apart}: {differs}; evaluate both alike")


def _identities(*both: Data) -> tuple[str, ...]:
    """What tells data apart: the fingerprint, or where and how much where there is none (a data set
    of the hub)."""
    if all(data.sha256 for data in both):
        return tuple(data.sha256[:12] for data in both)
    return tuple(f"{data.rows:,} rows of {data.source}" for data in both)


def paired(a: SuiteResult, b: SuiteResult, column: ScoreColumn) -> tuple[Scores, Scores] | None:
    """The documents of both, which must be the same; None where one of them tells none."""
    mine, theirs = a.documents(column), b.documents(column)
    if mine is None or theirs is None:
        return None
    if not np.array_equal(mine.ids, theirs.ids):
        only = sorted(set(mine.ids.tolist()) ^ set(theirs.ids.tolist()))
        files = f"{a.samples_file(column.task)} and {b.samples_file(column.task)}"
        apart = f"{len(only):,} documents stand in only one of them"
        raise AmorError(f"{files}: {apart} (doc_id {only[0]} is the first)")
    return mine, theirs


def labels(rows: list[SuiteResult]) -> list[str]:
    """A name per row: that of its model, with its folder where two have the same, and how its gates
    were run."""
    names = [" ".join(row.evaluation.amor.model.name.split()) for row in rows]
    found = []
    for row, name in zip(rows, names):
        folders = {each.file.parent for each, other in zip(rows, names) if other == name}
        where = f" ({row.file.parent})" if len(folders) > 1 else ""
        found.append(f"{name}{where}" + ("" if row.gates == "model" else f", {row.gates}"))
    return found


def columns(name: str, rows: Iterable[SuiteResult]) -> tuple[ScoreColumn, ...]:
    """Those of the suite; needles also have those of every task and length that was measured."""
    known = suite(name).columns
    if name != "niah":
        return known
    tasks, found = in_suite(name), set(known)
    for row in rows:
        for task in row.evaluation.results.keys() & tasks.keys():
            keys = row.evaluation.results[task]
            lengths = [key.removesuffix(",none") for key in keys if key.endswith(",none")]
            made = [tasks[task].column_at(int(n)) for n in lengths if n.isdecimal()]
            found |= {column for column in made if column and row.score(column)}
    return tuple(sorted(found, key=lambda column: (column.task, int(column.metric))))
