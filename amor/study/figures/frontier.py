"""Loss against cost: what a token of decode takes in time and in bytes, one line per gate from rare
to frequent firing."""

import statistics
from collections.abc import Callable

from amor.measures.speed import DecodeSpeed, decode_speeds
from amor.study.figures.base import FigureKind
from amor.study.figures.canvas import Figure, below, colour, figure, label, marker, panels
from amor.study.results import Results
from amor.study.tables.frontier import FrontierTable, frontier_points

COSTS: dict[str, Callable[[DecodeSpeed], float]] = {
    "microseconds per token": lambda speed: 1e6 * speed.seconds,
    "KB read per token": lambda speed: speed.bytes / 1e3,
}


class FrontierFigure(FigureKind):
    """Two panels, time and bytes."""

    kind = "frontier"
    needs = frozenset({"rates"})
    check = staticmethod(FrontierTable.check)

    @staticmethod
    def draw(results: Results) -> Figure:
        """One panel above the other."""
        drawing = figure(5.0)
        for axes, (unit, cost) in zip(panels(drawing, len(COSTS)), COSTS.items(), strict=True):
            for number, (row, points) in enumerate(_points_by_row(results, cost).items()):
                axes.plot(*zip(*points), color=colour(number), marker=marker(number), label=row)
            label(axes, unit, "held-out loss (nats per token)")
        return below(drawing)


def _points_by_row(
    results: Results, cost: Callable[[DecodeSpeed], float]
) -> dict[str, list[tuple[float, float]]]:
    """Row -> (cost, loss) at each firing rate."""
    points: dict[str, list[tuple[float, float]]] = {}
    for _, row, rate, loss in frontier_points(results):
        costs = [cost(speed) for speed in decode_speeds(results, row, rate)]
        if loss is not None and costs:
            points.setdefault(row, []).append((statistics.mean(costs), loss.mean))
    return points
