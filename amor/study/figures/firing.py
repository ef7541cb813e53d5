"""Firing rate against position: a row of panels per model, a column per set of texts, a line per block."""

from __future__ import annotations

from typing import TYPE_CHECKING

from amor.errors import AmorError
from amor.study.eval_tables import SuiteRows
from amor.study.figures.base import FigureKind
from amor.study.figures.canvas import BLOCKS, figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class FiringFigure(FigureKind):
    kind = "firing"
    suites = ("length-extrapolation",)

    @staticmethod
    def draw(suite_rows: SuiteRows) -> Figure:
        gated = [
            (label, row.evaluation.amor.curves)
            for label, row in zip(suite_rows.labels, suite_rows.rows)
            if any(curve.rates and curve.rates[0] for curve in row.evaluation.amor.curves.values())
        ]
        if not gated:
            raise AmorError(
                f"{suite_rows.rows[0].file}: amor.curves tells no firing rates; of models without gated blocks there are none"
            )
        sets = list(dict.fromkeys(name for _, curves in gated for name in curves))
        drawing = figure(max(1.7 * len(sets) + 0.8, 3.2), 1.6 * len(gated) + 0.6)
        panels = drawing.subplots(len(gated), len(sets), squeeze=False, sharex=True, sharey=True)
        for across, (label, curves) in zip(panels, gated):
            across[0].set_ylabel(f"{label}\nfiring rate")
            for name, panel in zip(sets, across):
                curve = curves.get(name)
                for block in range(len(curve.rates[0]) if curve and curve.rates else 0):
                    x, y = [length / 1024 for length in curve.lengths], [rates[block] for rates in curve.rates]  # type: ignore[union-attr]
                    colour = BLOCKS[block % len(BLOCKS)]
                    panel.plot(x, y, color=colour, marker="o", markersize=2, linewidth=1.1, label=f"block {block}")
                panel.set_ylim(0, 1)
        for name, top, bottom in zip(sets, panels[0], panels[-1]):
            top.set_title(name)
            bottom.xaxis.set_major_formatter("{x:g}K")
            bottom.set_xlabel("position, tokens")
        known = {label: handle for panel in panels.flat for handle, label in zip(*panel.get_legend_handles_labels())}
        drawing.legend(known.values(), known.keys(), loc="lower center", ncols=len(known))
        drawing.tight_layout(rect=(0, 0.24 / drawing.get_figheight(), 1, 1))
        return drawing
