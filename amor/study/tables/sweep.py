"""Every learning rate that was tried, by the loss that training measured at its end."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from amor.study.cells import missing_notes, study_table
from amor.study.paired import standard_error
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
                mine = [r for r in results.runs if (r.planned.row, r.planned.lr) == (row, lr)]
                losses = np.array([run.valid for run in mine if run.valid is not None])
                error = standard_error(losses) if len(losses) > 1 else None
                cell = Cell(float(losses.mean()), error, 4) if len(losses) else None
                mark = " (shown)" if row in best and best[row] == lr else ""
                cells = (cell, Cell(len(losses), digits=0))
                lines.append(TableRow(f"{row}, lr {lr:g}{mark}", cells))
        meaning = "loss on validation windows at the last step; the error is over seeds"
        remarks = (meaning, *missing_notes(results))
        return study_table(results, "learning rates", "run", ("loss", "seeds"), lines, *remarks)
