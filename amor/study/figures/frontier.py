"""Loss against cost: what a token of decode takes in time and in bytes, a line a gate from rare to frequent firing."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import TYPE_CHECKING

from amor.records.study import Decoded
from amor.study.figures.canvas import BLOCKS, FAINT, figure
from amor.study.figures.rates import MARKS
from amor.study.result_tables import points
from amor.study.results import Results

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COSTS: dict[str, Callable[[Decoded], float]] = {
    "microseconds a token": lambda one: 1e6 * one.seconds,
    "KB read a token": lambda one: one.bytes / 1e3,
}


def draw(held: Results) -> Figure:
    drawing = figure(8.4, 2.8)
    for axes, (label, cost) in zip(drawing.subplots(1, 2), COSTS.items(), strict=True):
        curves(axes, held, cost)
        axes.set_xlabel(label)
        axes.set_ylabel("held-out loss (nats a token)")
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=7)
        axes.grid(color=FAINT, linewidth=0.3, alpha=0.4)
    axes.legend(fontsize=6, frameon=False, loc="upper left", bbox_to_anchor=(1.01, 1.0))  # beside the last one, for both
    drawing.tight_layout(w_pad=1.6)
    return drawing


def curves(axes: Axes, held: Results, cost: Callable[[Decoded], float]) -> None:
    lines: dict[str, list[tuple[float, float]]] = {}
    for _, row, rate, loss in points(held):
        spent = [cost(one) for one in held.decode(row, rate)]
        if loss is not None and spent:
            lines.setdefault(row, []).append((statistics.mean(spent), loss.mean))
    for number, (row, places) in enumerate(lines.items()):
        colour, mark = BLOCKS[number % len(BLOCKS)], MARKS[number % len(MARKS)]
        axes.plot(*zip(*places), color=colour, marker=mark, markersize=3, linewidth=1.1, label=row)
