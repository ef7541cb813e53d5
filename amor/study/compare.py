"""Two models on the same documents, by a paired bootstrap: the difference of every task and their
average, and how sure it is."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np

from amor.errors import AmorError
from amor.eval.tasks import ScoreColumn
from amor.study import evals
from amor.study.evals import SuiteResult
from amor.study.paired import Numbers, resampled
from amor.study.table import Cell, Table, TableRow, as_number, one_line

MOST = 1_000_000  # resamples


@dataclass(frozen=True)
class Difference:
    """A minus B, as it is shown: accuracies in points of a hundred."""

    name: str
    task: str
    metric: str
    documents: int
    a: float
    b: float
    difference: float
    low: float  # the middle 95 % of resamples
    high: float
    better: float  # share of resamples in which A is better; a tie counts half
    digits: int = 1


@dataclass(frozen=True)
class Comparison:
    """Two models on one suite, task by task."""

    suite: str
    a: str
    b: str
    samples: int
    seed: int
    tasks: tuple[Difference, ...]
    average: Difference | None  # of all accuracies, where there are several
    left_out: tuple[str, ...]  # tasks that only one has, or without numbers per document


def compare(a: SuiteResult, b: SuiteResult, samples: int = 10_000, seed: int = 0) -> Comparison:
    """Compare two evaluations of one suite by a paired bootstrap of `samples` draws."""
    if not 1 <= samples <= MOST:
        raise AmorError(f"--samples {samples}: from 1 to {MOST:,} resamples")
    if seed < 0:
        raise AmorError(f"--seed {seed}: 0 or more")
    name, other = a.evaluation.amor.suite, b.evaluation.amor.suite
    if name != other:
        apart = f"{a.file} is of the suite {name}, {b.file} of {other}"
        raise AmorError(f"{apart}; compare the same")
    evals.check_comparable([a, b])
    tasks: list[Difference] = []
    percents: list[tuple[Difference, Numbers]] = []  # accuracies, and the differences of each draw
    left_out = []
    for column in evals.columns(name, [a, b]):
        if a.score(column) is None and b.score(column) is None:
            continue
        both = evals.paired(a, b, column)
        if both is None:
            left_out.append(column.title)
            continue
        # each task has draws of its own, whatever else is compared
        random = np.random.default_rng(
            (seed, zlib.crc32(f"{column.task}/{column.metric}".encode()))
        )
        drawn = resampled(*both, samples, random) * column.factor
        means = [scores.mean * column.factor for scores in both]
        tasks.append(_difference(column, len(both[0].ids), means[0], means[1], drawn))
        percents += [(tasks[-1], drawn)] if column.percent else []
    if not tasks:
        lack = "no task of which both tell the numbers of documents"
        raise AmorError(f"{a.file} and {b.file}: {lack} (samples_{name}_<task>.jsonl)")
    average = _average(percents) if len(percents) > 1 else None
    left, (mine, theirs) = tuple(left_out), evals.labels([a, b])
    return Comparison(name, mine, theirs, samples, seed, tuple(tasks), average, left)


def _difference(
    column: ScoreColumn, documents: int, a: float, b: float, drawn: Numbers
) -> Difference:
    low, high = map(float, np.quantile(drawn, (0.025, 0.975)))
    better = float((np.sign(-drawn if column.lower else drawn) + 1).mean() / 2)
    known = column.title, column.task, column.metric
    return Difference(*known, documents, a, b, a - b, low, high, better, column.digits)


def _average(tasks: list[tuple[Difference, Numbers]]) -> Difference:
    """Each resample has an average of its own: documents of different tasks are drawn apart."""
    a, b = (sum(getattr(task, side) for task, _ in tasks) / len(tasks) for side in "ab")
    documents = sum(task.documents for task, _ in tasks)
    drawn = np.mean([drawn for _, drawn in tasks], axis=0)
    return _difference(ScoreColumn(f"average of {len(tasks)}", "", ""), documents, a, b, drawn)


def table(found: Comparison) -> Table:
    """The comparison for people: one row per task, and their average."""
    rows = []
    for row in [*found.tasks, *([found.average] if found.average else [])]:
        gap, low, high = (_signed(v, row.digits) for v in (row.difference, row.low, row.high))
        a, b = (Cell(score, digits=row.digits) for score in (row.a, row.b))
        cells = (f"{row.documents:,}", a, b, gap, f"[{low}, {high}]", f"{row.better:.1%}")
        rows.append(TableRow(row.name, cells))
    drawn = f"{found.samples:,} resamples of documents, seed {found.seed}"
    names = f"A = {one_line(found.a)}, B = {one_line(found.b)}"
    missing = "left out, because one of the two has no numbers per document"
    notes = (f"{missing}: {', '.join(found.left_out)}",) if found.left_out else ()
    columns = ("documents", "A", "B", "A - B", "95 % interval", "A better")
    return Table(f"{found.suite}: {names}; {drawn}", "task", columns, tuple(rows), notes=notes)


def _signed(value: float, digits: int) -> str:
    return ("+" if value > 0 else "") + as_number(value, digits + 1)
