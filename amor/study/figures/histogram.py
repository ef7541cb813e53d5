"""The scores of one block on held-out text, with the threshold: right of it, in full colour,
attention runs."""

from dataclasses import dataclass

import numpy as np

from amor.records.findings import Histogram
from amor.study.figures.base import FigureKind
from amor.study.figures.canvas import INK, Figure, colour, figure, label


@dataclass(frozen=True)
class BlockScores:
    """A block's histogram and what is written below it."""

    block: int
    scores: Histogram
    label: str  # what the score is


class HistogramFigure(FigureKind):
    """Bars, pale where the block did not fire."""

    kind = "histogram"

    @staticmethod
    def draw(data: BlockScores) -> Figure:
        """One panel."""
        scores = data.scores
        drawing = figure(1.9)
        axes = drawing.subplots()
        edges = np.linspace(scores.low, scores.high, len(scores.shares) + 1)
        middle, width = (edges[:-1] + edges[1:]) / 2, 0.9 * (edges[1] - edges[0])
        fired = middle > (np.inf if scores.threshold is None else scores.threshold)
        percent = 100 * np.array(scores.shares)
        for bars, alpha in ((~fired, 0.35), (fired, None)):
            axes.bar(middle[bars], percent[bars], width, color=colour(data.block), alpha=alpha)
        if scores.threshold is not None and scores.low <= scores.threshold <= scores.high:
            axes.axvline(scores.threshold, color=INK)
        label(axes, data.label, "tokens (%)")
        drawing.tight_layout()
        return drawing
