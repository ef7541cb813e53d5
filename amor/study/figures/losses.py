"""The held-out loss of every row of a study, with its error; the paper has such a row for each of its models."""

from __future__ import annotations

from typing import TYPE_CHECKING

from amor.measures.loss import losses
from amor.study.figures.base import FigureKind
from amor.study.figures.canvas import BLOCKS, FAINT, INK, figure
from amor.study.results import Results

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class LossesFigure(FigureKind):
    kind = "losses"
    needs = frozenset({"loss"})

    @staticmethod
    def draw(results: Results) -> Figure:
        rows = [(row, grid) for row in results.ledger.rows if (grid := losses(results, row)) is not None]
        drawing = figure(5.2, 1.0 + 0.24 * max(len(rows), 1))
        axes = drawing.subplots()
        for place, (row, grid) in enumerate(rows):
            colour = BLOCKS[0] if any(each.fire for each in results.of(row, "loss").values()) else INK
            axes.plot(grid.values.mean(1), [place] * len(grid.seeds), color=FAINT, marker="o", markersize=2, linestyle="")
            axes.errorbar([grid.mean], [place], xerr=[grid.error], color=colour, marker="o", markersize=4, capsize=2)
        axes.set_yticks(range(len(rows)), [row for row, _ in rows])
        axes.invert_yaxis()
        axes.set_xlabel("held-out loss (nats per token)\nsmall: each seed, bars: one standard error")
        axes.grid(visible=False, axis="y")
        drawing.tight_layout()
        return drawing
