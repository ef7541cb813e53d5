"""Every learning rate that was tried, by the loss that training measured at its end."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from amor.study.cells import missing_notes
from amor.study.results import best_learning_rates
from amor.study.table import Cell, Table, TableRow
from amor.study.tables.base import StudyTable

if TYPE_CHECKING:
    from amor.study.definition import Study
    from amor.study.results import Results


class SweepTable(StudyTable):
    """Validation loss of every row at every learning rate."""

    kind = "sweep"

    @staticmethod
    def check(study: Study) -> None:
        """Refuse a study with one learning rate."""
        if not study.lr:
            raise ValueError("tables: sweep shows learning rates; give several in lr")

    @staticmethod
    def table(results: Results) -> Table:
        """One line per row and learning rate."""
        best, lines = best_learning_rates(results.runs), []
        for row in results.ledger.rows:
            for lr in results.study.lr:
                runs = [
                    run for run in results.runs if (run.planned.row, run.planned.lr) == (row, lr)
                ]
                losses = [run.valid for run in runs if run.valid is not None]
                error = statistics.stdev(losses) / len(losses) ** 0.5 if len(losses) > 1 else None
                cell = Cell(statistics.mean(losses), error, 4) if losses else None
                mark = " (shown)" if row in best and best[row] == lr else ""
                lines.append(
                    TableRow(f"{row}, lr {lr:g}{mark}", (cell, Cell(len(losses), digits=0)))
                )
        meaning = "loss on validation windows at the last step; the error is over seeds"
        title, remarks = (
            f"{results.study.title}: learning rates",
            (meaning, *missing_notes(results)),
        )
        return Table(title, "run", ("loss", "seeds"), tuple(lines), notes=remarks)
