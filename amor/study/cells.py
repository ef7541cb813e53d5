"""Cells and notes that tables of studies share: means over seeds, paired comparisons, and what is
missing."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from amor.study.paired import Gap, Grid, standard_error
from amor.study.table import Cell, Table, TableRow

if TYPE_CHECKING:
    from amor.study.results import Results


def study_table(
    results: Results,
    about: str,  # what of the study it shows
    first: str,
    columns: Iterable[str],
    lines: Iterable[TableRow],
    *remarks: str,
) -> Table:
    """A table that is titled by its study."""
    title = f"{results.study.title}: {about}"
    return Table(title, first, tuple(columns), tuple(lines), notes=remarks)


def mean_cell(values: Iterable[float | None], digits: int) -> Cell | None:
    """The mean of the values that are known; None where none is."""
    known = [value for value in values if value is not None]
    return Cell(statistics.mean(known), digits=digits) if known else None


def pooled_cell(seeds: Sequence[tuple[float, float]], digits: int) -> Cell | None:
    """The mean over seeds, from (mean, error over windows) of each; None where there is none."""
    if not seeds:
        return None
    return Cell(statistics.mean(mean for mean, _ in seeds), pooled_error(seeds), digits)


def grid_cell(grid: Grid | None, digits: int = 4) -> Cell | None:
    """The mean over seeds and windows with its error."""
    return None if grid is None else Cell(grid.mean, grid.error, digits)


def best_cell(
    row: str, rows: dict[str, Grid | None], sign: int = 1, digits: int = 4
) -> Cell | None:
    """The mean of one row; it is best where it lies clearly below (sign -1: above) that of every
    other row."""
    mine, others = rows[row], [grid for name, grid in rows.items() if name != row]
    if mine is None:
        return None
    gaps = [mine.ahead(other) for other in others if other is not None]
    best = bool(gaps) and all(g is not None and Gap(sign * g.size, g.error).clear for g in gaps)
    return Cell(mine.mean, mine.error, digits, best)


def pooled_error(seeds: Sequence[tuple[float, float]]) -> float:
    """The error of a mean over seeds that were measured on the same windows, from (mean, error over
    windows) of each: the root of two squares, that of the windows and that of the seeds."""
    of_windows = statistics.mean(se for _, se in seeds)
    of_seeds = standard_error(np.array([mean for mean, _ in seeds]))
    return float((of_windows**2 + of_seeds**2) ** 0.5)


def notes(results: Results, kind: str) -> Iterator[str]:
    """How the numbers of a kind came about, and what is missing."""
    steps = sorted({run.steps for run in results.ledger.runs})
    by_row = [results.of(row, kind) for row in results.ledger.rows]
    seeds = [seed for seed in results.study.seeds if any(seed in each for each in by_row)]
    threads = "1 thread" if results.study.threads == 1 else f"{results.study.threads} threads"
    named = ", ".join(map(str, seeds)) or "none yet"
    yield f"{'/'.join(f'{n:,}' for n in steps)} steps; seeds {named}; {threads} per run"
    for text in [one.data for each in by_row for one in each.values()][:1]:
        windows = f"{text.windows} windows of {text.context:,} tokens of {text.source}"
        yield f"losses: {windows}, nats per token"
    yield from chosen_on(results, "windows of the same held-out split")
    several = max(map(len, by_row)) > 1
    errors = "and of seeds together" if several else "alone, for there is one seed"
    yield f"errors: of windows {errors}"
    yield from missing_notes(results)


def chosen_on(results: Results, text: str) -> Iterator[str]:
    """Where several learning rates were tried: on what the one that is shown was chosen."""
    if results.study.lr:
        yield f"of each row the learning rate of the lowest validation loss, chosen on {text}"


def missing_notes(results: Results) -> Iterator[str]:
    """One note per row that lacks measurements."""
    yield from (f"missing: {words}" for words in results.missing())
