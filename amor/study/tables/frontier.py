"""Loss against cost: every gate at every rate; models without gates, and gates that cannot be set
to a rate, as they are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from amor.measures.loss import LossOptions, losses
from amor.measures.rates import RatesOptions, policy_losses
from amor.measures.speed import decode_speeds
from amor.study.cells import grid_cell, mean_cell, notes
from amor.study.paired import Grid
from amor.study.table import Cell, Table, TableRow
from amor.study.tables.base import StudyTable

if TYPE_CHECKING:
    from amor.study.definition import Study
    from amor.study.results import Results


class FrontierTable(StudyTable):
    """Loss, time and bytes of every row at every firing rate."""

    kind = "frontier"
    needs = frozenset({"rates"})

    @staticmethod
    def check(study: Study) -> None:
        """Losses that stand side by side must be of the same windows."""
        measured = study.measurements()
        sides = {
            (options.windows, options.context)
            for options in measured.values()
            if isinstance(options, (LossOptions, RatesOptions))
        }
        if len(sides) > 1:
            raise ValueError(
                "frontier sets judge.loss and judge.rates side by side: give both the same "
                "windows and context"
            )

    @staticmethod
    def table(results: Results) -> Table:
        """One line per row and firing rate."""
        columns = (
            "loss",
            "fires in decode, %",
            "µs per token",
            "KB per token",
            "passes over the head",
        )
        lines = [
            TableRow(name, (grid_cell(loss), *_cost(results, row, rate)))
            for name, row, rate, loss in frontier_points(results)
            if loss is not None
        ]
        meaning = (
            "loss on held-out text; time and bytes of decode, one row, float32, the best round"
        )
        title, remarks = (
            f"{results.study.title}: loss against cost",
            (meaning, *notes(results, "rates")),
        )
        return Table(title, "model", columns, tuple(lines), notes=remarks)


def frontier_points(results: Results) -> Iterator[tuple[str, str, float | None, Grid | None]]:
    """Name, row, firing rate and losses of everything whose loss and cost are measured."""
    ends = {0.0: "never", 1.0: "always"}
    rates = results.options("rates").rates
    for row in results.ledger.rows:
        if not results.of(row, "rates"):
            yield row, row, None, losses(results, row)
            continue
        if all(policy_losses(results, row, "gate", rate) is None for rate in rates):
            yield (
                row,
                row,
                None,
                policy_losses(results, row, "as it is"),
            )  # it has no threshold to set, such as always
            continue
        timed = {one.rate for each in results.of(row, "speed").values() for one in each.decode}
        for rate in sorted({*rates, *(end for end in ends if end in timed)}):
            policy = ("gate", rate) if rate in rates else (ends[rate], None)
            yield f"{row} at {100 * rate:g} %", row, rate, policy_losses(results, row, *policy)


def _cost(results: Results, row: str, rate: float | None) -> tuple[Cell | None, ...]:
    each = decode_speeds(results, row, rate)
    return (
        mean_cell((100 * one.fire for one in each), 1),
        mean_cell((1e6 * one.seconds for one in each), 0),
        mean_cell((one.bytes / 1e3 for one in each), 0),
        mean_cell((one.head_passes for one in each), 2),
    )
