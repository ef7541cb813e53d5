"""Firing rate against position: a row of panels per model, a column per set of texts, a line per
block."""

from typing import Any

from amor.errors import AmorError
from amor.study.eval_tables import SuiteRows
from amor.study.figures.base import FigureKind
from amor.study.figures.canvas import Figure, below, colour, figure


class FiringFigure(FigureKind):
    """Of the models that have gated blocks."""

    kind = "firing"
    suites = ("length-extrapolation",)

    @staticmethod
    def draw(suite_rows: SuiteRows) -> Figure:
        by_label = {
            label: {name: c for name, c in row.evaluation.amor.curves.items() if any(c.rates)}
            for label, row in zip(suite_rows.labels, suite_rows.rows)
        }
        gated = {label: curves for label, curves in by_label.items() if curves}
        if not gated:
            raise AmorError(
                f"{suite_rows.rows[0].file}: amor.curves has no firing rates; of models without"
                " gated blocks there are none"
            )
        sets = list(dict.fromkeys(name for curves in gated.values() for name in curves))
        drawing = figure(max(1.7 * len(sets) + 0.8, 3.2), 1.6 * len(gated) + 0.6)
        grid = drawing.subplots(len(gated), len(sets), squeeze=False, sharex=True, sharey=True)
        for across, (label, curves) in zip(grid, gated.items()):
            across[0].set_ylabel(f"{label}\nfiring rate")
            for name, panel in zip(sets, across):
                panel.set_ylim(0, 1)
                if curve := curves.get(name):
                    x = [length / 1024 for length in curve.lengths]
                    for block, rates in enumerate(zip(*curve.rates)):
                        style: dict[str, Any] = {
                            "color": colour(block),
                            "marker": "o",
                            "markersize": 2,
                        }
                        panel.plot(x, rates, label=f"block {block}", **style)
        for name, top, bottom in zip(sets, grid[0], grid[-1]):
            top.set_title(name)
            bottom.xaxis.set_major_formatter("{x:g}K")
            bottom.set_xlabel("position, tokens")
        below(drawing, columns=8)
        return drawing
