"""Two models on the same documents, by a paired bootstrap: the difference of every task and their
average, and how sure it is."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np

from amor.errors import AmorError
from amor.study import evals
from amor.study.evals import SuiteResult
from amor.study.paired import Numbers, resampled
from amor.study.suites import ScoreColumn
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
    name = a.evaluation.amor.suite
    if name != b.evaluation.amor.suite:
        raise AmorError(
            f"{a.file} is of the suite {name}, {b.file} of {b.evaluation.amor.suite}; compare the "
            "same"
        )
    evals.side_by_side([a, b])
    tasks, draws, left_out = [], [], []
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
        one, other = (float(scores.score(scores.values.mean())) * column.factor for scores in both)
        tasks.append(_difference(column, len(both[0].ids), one, other, drawn))
        draws.append((column, drawn))
    if not tasks:
        raise AmorError(
            f"{a.file} and {b.file}: no task of which both tell the numbers of documents "
            f"(samples_{name}_<task>.jsonl)"
        )
    first, second = evals.labels([a, b])
    return Comparison(
        name, first, second, samples, seed, tuple(tasks), _average(tasks, draws), tuple(left_out)
    )


def _difference(
    column: ScoreColumn, documents: int, a: float, b: float, drawn: Numbers
) -> Difference:
    low, high = np.quantile(drawn, (0.025, 0.975))
    better = float((np.sign(-drawn if column.lower else drawn) + 1).mean() / 2)
    return Difference(
        column.title,
        column.task,
        column.metric,
        documents,
        a,
        b,
        a - b,
        float(low),
        float(high),
        better,
        column.digits,
    )


def _average(
    tasks: list[Difference], draws: list[tuple[ScoreColumn, Numbers]]
) -> Difference | None:
    """Each resample has an average of its own: documents of different tasks are drawn apart."""
    kept = [(task, drawn) for task, (column, drawn) in zip(tasks, draws) if column.percent]
    if len(kept) < 2:
        return None
    a, b = (sum(getattr(task, side) for task, _ in kept) / len(kept) for side in "ab")
    column = ScoreColumn(f"average of {len(kept)}", "", "")
    return _difference(
        column,
        sum(task.documents for task, _ in kept),
        a,
        b,
        np.mean([drawn for _, drawn in kept], axis=0),
    )


def table(found: Comparison) -> Table:
    """The comparison for people: one row per task, and their average."""
    rows = []
    for row in [*found.tasks, *([found.average] if found.average else [])]:
        gap, low, high = (
            _signed(value, row.digits) for value in (row.difference, row.low, row.high)
        )
        scores = (Cell(row.a, digits=row.digits), Cell(row.b, digits=row.digits))
        rows.append(
            TableRow(
                row.name,
                (f"{row.documents:,}", *scores, gap, f"[{low}, {high}]", f"{row.better:.1%}"),
            )
        )
    drawn = f"{found.samples:,} resamples of documents, seed {found.seed}"
    names = f"A = {one_line(found.a)}, B = {one_line(found.b)}"
    missing = (
        f"left out, because one of the two has no numbers per document: {', '.join(found.left_out)}"
    )
    columns = ("documents", "A", "B", "A - B", "95 % interval", "A better")
    notes = (missing,) if found.left_out else ()
    return Table(f"{found.suite}: {names}; {drawn}", "task", columns, tuple(rows), notes=notes)


def _signed(value: float, digits: int) -> str:
    return ("+" if value > 0 else "") + as_number(value, digits + 1)
