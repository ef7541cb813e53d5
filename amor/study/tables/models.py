"""Every row of a study once: size, loss and speed, and the paper's models below."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from amor.measures.loss import losses
from amor.measures.speed import decode_speeds
from amor.numbers import perplexity
from amor.study import paper_models
from amor.study.cells import best_cell, mean_cell, notes
from amor.study.paper_models import SCALE
from amor.study.table import Cell, Table, TableRow
from amor.study.tables.base import StudyTable

if TYPE_CHECKING:
    from amor.study.results import Results

THEIRS = (
    "the paper: perplexity of FineWeb-Edu; firing rate and tokens/s on one H100, after 3K tokens"
)


class ModelsTable(StudyTable):
    """Size, loss, firing rate and speed of every row."""

    kind = "models"
    needs = frozenset({"loss"})

    @staticmethod
    def table(results: Results) -> Table:
        """One line per row, the paper's models below."""
        study, measured = results.study, results.study.measurements()
        columns: dict[str, Callable[[str], Cell | None]] = {}
        if "size" in measured:
            columns["M parameters"] = lambda row: mean_cell(
                (s.parameters / 1e6 for s in results.of(row, "size").values()), 3
            )
        by_row = {row: losses(results, row) for row in results.ledger.rows}
        columns["loss"] = lambda row: best_cell(row, by_row)
        columns["perplexity"] = lambda row: (
            None if (grid := by_row[row]) is None else Cell(perplexity(grid.mean), digits=2)
        )
        if study.baseline is not None:
            columns[f"loss - {study.baseline}'s"] = lambda row: _over_baseline(results, row)
        columns["fires, %"] = lambda row: mean_cell(
            (100 * rate for each in results.of(row, "loss").values() for rate in each.fire), 1
        )
        if "speed" in measured:
            columns["train tok/s"] = lambda row: mean_cell(
                (s.train for s in results.of(row, "speed").values()), 0
            )
            columns["decode tok/s"] = lambda row: mean_cell(
                (1 / s.seconds for s in decode_speeds(results, row, None)), 0
            )
        lines = [
            TableRow(row, tuple(make(row) for make in columns.values()))
            for row in results.ledger.rows
        ]
        theirs = _paper_rows(tuple(columns)) if study.paper else []
        remarks = (*notes(results, "loss"), *([THEIRS] if study.paper else []))
        return Table(
            study.title, "model", tuple(columns), (*lines, *theirs), f"the paper, {SCALE}", remarks
        )


def _over_baseline(results: Results, row: str) -> Cell | None:
    """The loss less that of the baseline's row with the same values of the axes, paired by seed and
    window."""
    rows, names = results.ledger.rows, [run.name for run in results.study.runs]
    each = len(rows) // len(names)  # every run has one row per point of the axes, in one order
    assert results.study.baseline is not None
    baseline = rows[names.index(results.study.baseline) * each + rows.index(row) % each]
    mine, theirs = losses(results, row), losses(results, baseline)
    ahead = (
        theirs.ahead(mine) if mine is not None and theirs is not None and row != baseline else None
    )
    return None if ahead is None else Cell(ahead.size, ahead.error, 4)


def _paper_rows(columns: Sequence[str]) -> Iterator[TableRow]:
    """The paper's models in the columns that it reports."""
    digits = {"perplexity": 2, "train tok/s": 0, "decode tok/s": 1, "fires, %": 1}
    for model, values in paper_models.reported().items():
        fires = None if values.fires is None else 100 * values.fires
        numbers = {
            "perplexity": values.perplexity,
            "train tok/s": values.train,
            "decode tok/s": values.decode,
        }
        cells = {
            name: value
            for name, value in {**numbers, "fires, %": fires}.items()
            if value is not None
        }
        shown = (
            Cell(cells[name], digits=digits[name]) if name in cells else None for name in columns
        )
        yield TableRow(model, tuple(shown), "paper")
