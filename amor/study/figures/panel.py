"""Curves between two axes, over the steps of a run or the tokens of a text: a panel of a page."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from amor.study.figures.base import FigureKind
from amor.study.figures.canvas import FAINT, INK, Figure, colour, figure, label

POINTS = 400  # drawn per curve at most; longer ones are averaged
STYLES: dict[str, dict[str, Any]] = {
    "line": {},
    "thin": {"linewidth": 0.6, "alpha": 0.45},
    "dots": {"marker": "o", "linewidth": 0.6},
    "dashed": {"linestyle": "--"},
}


@dataclass(frozen=True)
class PanelCurve:
    """A line of a panel, and what the legend calls it."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    block: int = 0  # its shade
    style: str = "line"  # one of STYLES


@dataclass(frozen=True)
class Panel:
    """What is drawn between two axes."""

    title: str
    y: str  # title of the y axis, with its unit
    curves: Sequence[PanelCurve] = ()
    band: tuple[PanelCurve, PanelCurve] | None = None  # the region between two curves
    zero: bool = False  # the y axis begins at 0
    log: bool = False
    limits: tuple[float, float] | None = None  # of the y axis
    x: str = "step"  # title of the x axis
    values: bool = True  # whether the legend gives the last value of every curve
    level: tuple[float, str] | None = None  # a horizontal line and its name


class PanelFigure(FigureKind):
    """Small, as it stands in a row of others."""

    kind = "panel"

    @staticmethod
    def draw(panel: Panel) -> Figure:
        """One pair of axes."""
        drawing = figure(1.9)
        axes = drawing.subplots()
        for curve in panel.curves:
            x, y = thin(curve.x, curve.y)
            last = f" {curve.y[-1]:.4g}" if panel.values and len(curve.y) else ""
            name = "_" if curve.style == "thin" else f"{curve.name}{last}"
            axes.plot(x, y, color=colour(curve.block), label=name, **STYLES[curve.style])
        if panel.band:
            (x, low), (_, high) = (thin(curve.x, curve.y) for curve in panel.band)
            shade, name = colour(panel.band[0].block), panel.band[0].name
            axes.fill_between(x, low, high, color=shade, alpha=0.18, linewidth=0, label=name)
        if panel.level:
            axes.axhline(panel.level[0], color=FAINT, linestyle=":", label=panel.level[1])
        if panel.log:
            axes.set_yscale("log")
        if panel.zero:
            axes.set_ylim(bottom=0)
        if panel.limits:
            axes.set_ylim(*panel.limits)
        if len(axes.get_legend_handles_labels()[0]) > 1:
            axes.legend(labelcolor=INK)
        label(axes, panel.x, panel.y)
        drawing.tight_layout()
        return drawing


def thin(x: Sequence[float], y: Sequence[float]) -> tuple[Any, Any]:
    """At most POINTS points, each the mean of its neighbours."""
    if len(x) <= POINTS:
        return x, y
    parts = np.array_split(np.arange(len(x)), POINTS)
    xs, ys = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    return [xs[part].mean() for part in parts], [ys[part].mean() for part in parts]
