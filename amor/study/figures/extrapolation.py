"""Perplexity against length, a panel per set of texts and a line per model; a band is one standard error over segments."""

from __future__ import annotations

from typing import TYPE_CHECKING

from amor.errors import AmorError
from amor.study.eval_tables import SuiteRows
from amor.study.figures.base import FigureKind
from amor.study.figures.canvas import BLOCKS, figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ACROSS = 3  # panels in a row
MARKERS = "osD^vP"


class ExtrapolationFigure(FigureKind):
    kind = "extrapolation"
    suites = ("length-extrapolation",)

    @staticmethod
    def draw(suite_rows: SuiteRows) -> Figure:
        sets = list(dict.fromkeys(name for row in suite_rows.rows for name in row.evaluation.amor.curves))
        if not sets:
            raise AmorError(f"{suite_rows.rows[0].file}: amor.curves holds no set of texts to draw")
        across = min(len(sets), ACROSS)
        down = -(-len(sets) // across)
        drawing = figure(max(2.5 * across, 3.6), 2.1 * down + 0.5)
        panels = drawing.subplots(down, across, squeeze=False).flatten()
        for name, panel in zip(sets, panels):
            lines(panel, suite_rows, name)
        for spare in panels[len(sets) :]:
            spare.set_visible(False)
        handles, labels = drawing.axes[0].get_legend_handles_labels()
        drawing.legend(handles, labels, loc="lower center", ncols=min(len(labels), 3))
        foot = 0.14 * (-(-len(labels) // 3)) + 0.1
        drawing.tight_layout(rect=(0, foot / drawing.get_figheight(), 1, 1))
        return drawing


def lines(panel: Axes, suite_rows: SuiteRows, name: str) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    for number, (label, row) in enumerate(zip(suite_rows.labels, suite_rows.rows)):
        colour, curve = BLOCKS[number % len(BLOCKS)], row.evaluation.amor.curves.get(name)
        x = [length / 1024 for length in curve.lengths] if curve else []
        y = (curve.bucket if suite_rows.bucket else curve.prefix) if curve else ()
        mark = MARKERS[number % len(MARKERS)]
        panel.plot(x, y, color=colour, marker=mark, markersize=3, linewidth=1.2, label=label)
        if curve and not suite_rows.bucket:
            low = [max(value - error, value / 10) for value, error in zip(y, curve.errors)]
            panel.fill_between(x, low, [v + e for v, e in zip(y, curve.errors)], color=colour, alpha=0.18, linewidth=0)
    panel.set_yscale("log")
    panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    panel.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    panel.yaxis.set_minor_formatter(NullFormatter())
    panel.set_title(name)
    panel.xaxis.set_major_formatter(StrMethodFormatter("{x:g}K"))
    panel.set_xlabel("tokens")
    panel.set_ylabel("perplexity, last 1,024" if suite_rows.bucket else "perplexity of the prefix")
