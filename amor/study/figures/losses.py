"""The held-out loss of every row of a study, with its error; the paper has such a row for each of
its models."""

from typing import Any

from amor.measures.loss import losses
from amor.study.figures.base import FigureKind
from amor.study.figures.canvas import BLOCKS, FAINT, INK, Figure, figure
from amor.study.results import Results


class LossesFigure(FigureKind):
    """A bar per row, and a dot per seed."""

    kind = "losses"
    needs = frozenset({"loss"})

    @staticmethod
    def draw(results: Results) -> Figure:
        """Rows in the order of the study."""
        by_row = {row: losses(results, row) for row in results.ledger.rows}
        grids = {row: grid for row, grid in by_row.items() if grid is not None}
        drawing = figure(1.0 + 0.24 * max(len(grids), 1))
        axes = drawing.subplots()
        for place, (row, grid) in enumerate(grids.items()):
            gated = any(each.fire for each in results.of(row, "loss").values())
            bar: dict[str, Any] = {"color": BLOCKS[0] if gated else INK, "markersize": 4}
            seeds = grid.values.mean(1)
            axes.plot(seeds, [place] * len(seeds), "o", color=FAINT, markersize=2)
            axes.errorbar([grid.mean], [place], xerr=[grid.error], fmt="o", capsize=2, **bar)
        axes.set_yticks(range(len(grids)), grids)
        axes.invert_yaxis()
        words = "held-out loss (nats per token)\ngrey: each seed; bars: standard error"
        axes.set_xlabel(words, loc="right")  # beside long names the axes are narrower than this
        axes.set_ylabel("model")
        axes.grid(visible=False, axis="y")
        drawing.tight_layout()
        return drawing
