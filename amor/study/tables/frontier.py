"""Loss against cost: every gate at every rate; models without gates, and gates that cannot be set
to a rate, as they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from amor.measures.loss import losses
from amor.measures.rates import policy_losses
from amor.measures.speed import DecodeSpeed, decode_speeds
from amor.study.cells import grid_cell, mean_cell, notes, study_table
from amor.study.paired import Grid
from amor.study.table import Table, TableRow
from amor.study.tables.base import StudyTable

if TYPE_CHECKING:
    from amor.study.definition import Study
    from amor.study.results import Results

# column -> what a token of decode costs, and the digits shown
COSTS: dict[str, tuple[Callable[[DecodeSpeed], float], int]] = {
    "fires in decode, %": (lambda speed: 100 * speed.fire, 1),
    "µs per token": (lambda speed: 1e6 * speed.seconds, 0),
    "KB per token": (lambda speed: speed.bytes / 1e3, 0),
    "passes over the head": (lambda speed: speed.head_passes, 2),
}


class FrontierTable(StudyTable):
    """Loss, time and bytes of every row at every firing rate."""

    kind = "frontier"
    needs = frozenset({"rates"})

    @staticmethod
    def check(study: Study) -> None:
        """Losses that stand side by side must be of the same windows."""
        measured = study.measurements()
        read: list[Any] = [measured[kind] for kind in ("loss", "rates") if kind in measured]
        if len({(options.windows, options.context) for options in read}) > 1:
            hint = "give both the same windows and context"
            raise ValueError(f"frontier sets judge.loss and judge.rates side by side: {hint}")

    @staticmethod
    def table(results: Results) -> Table:
        """One line per row and firing rate."""
        lines = []
        for name, row, rate, loss in frontier_points(results):
            each = decode_speeds(results, row, rate)
            costs = (mean_cell(map(cost, each), digits) for cost, digits in COSTS.values())
            lines += [TableRow(name, (grid_cell(loss), *costs))] if loss is not None else []
        meaning = (
            "loss on held-out text; time and bytes of decode, one row, float32, the best round"
        )
        columns, remarks = ("loss", *COSTS), (meaning, *notes(results, "rates"))
        return study_table(results, "loss against cost", "model", columns, lines, *remarks)


def frontier_points(results: Results) -> Iterator[tuple[str, str, float | None, Grid | None]]:
    """Name, row, firing rate and losses of everything whose loss and cost are measured."""
    ends = {0.0: "never", 1.0: "always"}
    rates = results.options("rates").rates
    for row in results.ledger.rows:
        if not results.of(row, "rates"):
            yield row, row, None, losses(results, row)
            continue
        if all(policy_losses(results, row, "gate", rate) is None for rate in rates):
            # it has no threshold to set, such as always
            yield row, row, None, policy_losses(results, row, "as it is")
            continue
        timed = {one.rate for each in results.of(row, "speed").values() for one in each.decode}
        for rate in sorted({*rates, *(end for end in ends if end in timed)}):
            policy = ("gate", rate) if rate in rates else (ends[rate], None)
            yield f"{row} at {100 * rate:g} %", row, rate, policy_losses(results, row, *policy)
