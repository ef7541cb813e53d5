"""What the gates are worth on held-out text (amor/judge/value.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from amor.measures.base import MeasureKind, TextOptions
from amor.records.value import Value
from amor.study.cells import mean_cell, notes, pooled_cell, study_table
from amor.study.table import Table, TableRow

if TYPE_CHECKING:
    from amor.experiment.subject import FinishedRun
    from amor.study.results import Results

POLICIES = ("never", "random", "gate", "always", "oracle")


class ValueMeasure(MeasureKind):
    """What the gates save as they are, against chance, everywhere and the oracle."""

    kind = "value"
    Options, Result = TextOptions, Value
    needs_gates = needs_text = True
    version = 2  # 1 had rank correlations that were wrong where values tie

    @staticmethod
    def measure(subject: FinishedRun, options: TextOptions) -> Value:
        """Evaluate the policies on held-out windows."""
        from amor.judge.value import value

        return value(subject.model, subject.windows(options), rates=())

    @staticmethod
    def table(results: Results) -> Table:
        """What attention saved where it ran, against chance, everywhere and the oracle."""
        lines = []
        for row, values in results.by_row("value").items():
            for name in POLICIES:
                each = [getattr(one.losses, name) for one in values]
                saved = pooled_cell([(policy.saved, policy.saved_se) for policy in each], 4)
                fires = mean_cell((100 * rate for policy in each for rate in policy.fire_rate), 1)
                nll = mean_cell((policy.nll for policy in each), 4)
                lines.append(TableRow(f"{row}: {name}", (nll, saved, fires)))
        columns, remarks = ("loss", "saved over never", "fires, %"), notes(results, "value")
        return study_table(results, "what gates are worth", "policy", columns, lines, *remarks)
