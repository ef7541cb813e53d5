"""Every row of a study once: size, loss and speed, and the paper's models below."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from amor.measures.loss import losses
from amor.measures.speed import decode_speeds
from amor.numbers import perplexity
from amor.study import paper
from amor.study.cells import best_cell, mean_cell, notes
from amor.study.table import Cell, Table, TableRow
from amor.study.tables.base import StudyTable

if TYPE_CHECKING:
    from amor.study.results import Results

THEIRS = (
    "the paper: perplexity of FineWeb-Edu; firing rate and tokens/s on one H100, after 3K tokens"
)
# digits of the columns that the paper reports
DIGITS = {"perplexity": 2, "train tok/s": 0, "decode tok/s": 1, "fires, %": 1}


class ModelsTable(StudyTable):
    """Size, loss, firing rate and speed of every row."""

    kind = "models"
    needs = frozenset({"loss"})

    @staticmethod
    def table(results: Results) -> Table:
        """One line per row, the paper's models below."""
        study, measured, of = results.study, results.study.measurements(), results.of
        columns: dict[str, Callable[[str], Cell | None]] = {}
        if "size" in measured:
            columns["M parameters"] = lambda row: mean_cell(
                (s.parameters / 1e6 for s in of(row, "size").values()), 3
            )
        by_row = {row: losses(results, row) for row in results.ledger.rows}
        columns["loss"] = lambda row: best_cell(row, by_row)
        columns["perplexity"] = lambda row: (
            None if (grid := by_row[row]) is None else Cell(perplexity(grid.mean), digits=2)
        )
        if study.baseline is not None:
            columns[f"loss - {study.baseline}'s"] = lambda row: _over_baseline(results, row)
        columns["fires, %"] = lambda row: mean_cell(
            (100 * rate for each in of(row, "loss").values() for rate in each.fire), 1
        )
        if "speed" in measured:
            columns["train tok/s"] = lambda row: mean_cell(
                (s.train for s in of(row, "speed").values()), 0
            )
            columns["decode tok/s"] = lambda row: mean_cell(
                (1 / s.seconds for s in decode_speeds(results, row, None)), 0
            )
        lines = [
            TableRow(row, tuple(make(row) for make in columns.values()))
            for row in results.ledger.rows
        ]
        for model, numbers in paper.reported().items() if study.paper else ():
            cells = (
                Cell(numbers[name], digits=DIGITS[name]) if name in numbers else None
                for name in columns
            )
            lines.append(TableRow(model, tuple(cells), "paper"))
        remarks = (*notes(results, "loss"), *([THEIRS] if study.paper else []))
        below = f"the paper, {paper.SCALE}"
        return Table(study.title, "model", tuple(columns), tuple(lines), below, remarks)


def _over_baseline(results: Results, row: str) -> Cell | None:
    """The loss less that of the baseline's row with the same values of the axes, paired by seed and
    window."""
    rows, names = results.ledger.rows, [run.name for run in results.study.runs]
    each = len(rows) // len(names)  # every run has one row per point of the axes, in one order
    assert results.study.baseline is not None
    baseline = rows[names.index(results.study.baseline) * each + rows.index(row) % each]
    mine, theirs = losses(results, row), losses(results, baseline)
    if mine is None or theirs is None or row == baseline:
        return None
    ahead = theirs.ahead(mine)
    return None if ahead is None else Cell(ahead.size, ahead.error, 4)
