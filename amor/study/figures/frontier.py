"""Loss against cost: what a token of decode takes in time and in bytes, one line per gate from rare to frequent firing."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import TYPE_CHECKING

from amor.measures.speed import DecodeSpeed, decode_speeds
from amor.study.figures.base import FigureKind
from amor.study.figures.canvas import BLOCKS, MARKERS, beside, figure
from amor.study.results import Results
from amor.study.tables.frontier import FrontierTable, frontier_points

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COSTS: dict[str, Callable[[DecodeSpeed], float]] = {
    "microseconds per token": lambda one: 1e6 * one.seconds,
    "KB read per token": lambda one: one.bytes / 1e3,
}


class FrontierFigure(FigureKind):
    kind = "frontier"
    needs = frozenset({"rates"})
    check = staticmethod(FrontierTable.check)

    @staticmethod
    def draw(results: Results) -> Figure:
        drawing = figure(8.4, 2.8)
        for axes, (label, cost) in zip(drawing.subplots(1, 2), COSTS.items(), strict=True):
            curves(axes, results, cost)
            axes.set_xlabel(label)
            axes.set_ylabel("results-out loss (nats per token)")
        beside(axes)  # beside the last one, for both
        drawing.tight_layout(w_pad=1.6)
        return drawing


def curves(axes: Axes, results: Results, cost: Callable[[DecodeSpeed], float]) -> None:
    lines: dict[str, list[tuple[float, float]]] = {}
    for _, row, rate, loss in frontier_points(results):
        spent = [cost(one) for one in decode_speeds(results, row, rate)]
        if loss is not None and spent:
            lines.setdefault(row, []).append((statistics.mean(spent), loss.mean))
    for number, (row, places) in enumerate(lines.items()):
        colour, mark = BLOCKS[number % len(BLOCKS)], MARKERS[number % len(MARKERS)]
        axes.plot(*zip(*places), color=colour, marker=mark, markersize=3, linewidth=1.1, label=row)
