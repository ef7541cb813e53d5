"""What the gates are worth on held-out text (amor/judge/value.py)."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from amor.measures.base import MeasureKind, TextOptions
from amor.records.value import Value
from amor.study.cells import mean_cell, notes, pooled_error
from amor.study.table import Cell, Table, TableRow

if TYPE_CHECKING:
    from amor.experiment.subject import FinishedRun
    from amor.study.results import Results

POLICIES = ("never", "random", "gate", "always", "oracle")


class ValueOptions(TextOptions, frozen=True):
    """Which windows are read."""


class ValueMeasure(MeasureKind):
    """What the gates save as they are, against chance, everywhere and the oracle."""

    kind = "value"
    Options, Result = ValueOptions, Value
    needs_gates = needs_text = True
    version = 2  # 1 had rank correlations that were wrong where values tie

    @staticmethod
    def measure(subject: FinishedRun, options: ValueOptions) -> Value:
        """Evaluate the policies on held-out windows."""
        from amor.judge.value import value

        return value(subject.model, subject.windows(options), rates=())

    @staticmethod
    def table(results: Results) -> Table:
        """What attention saved where it ran, against chance, everywhere and the oracle."""
        lines = []
        for row in results.ledger.rows:
            values: list[Value] = list(results.of(row, "value").values())
            for name in POLICIES if values else ():
                each = [getattr(one.losses, name) for one in values]
                error = pooled_error([(policy.saved, policy.saved_se) for policy in each])
                saved = Cell(statistics.mean(policy.saved for policy in each), error, 4)
                fires = mean_cell((100 * rate for policy in each for rate in policy.fire_rate), 1)
                nll = mean_cell((policy.nll for policy in each), 4)
                lines.append(TableRow(f"{row}: {name}", (nll, saved, fires)))
        title, columns = (
            f"{results.study.title}: what gates are worth",
            ("loss", "saved over never", "fires, %"),
        )
        return Table(title, "policy", columns, tuple(lines), notes=tuple(notes(results, "value")))
