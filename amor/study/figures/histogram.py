"""The scores of one block on held-out text, with the threshold: right of it, in full colour, attention runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from amor.records.findings import Histogram
from amor.study.figures.base import FigureKind
from amor.study.figures.canvas import BLOCKS, INK, figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class BlockScores:
    block: int
    scores: Histogram
    label: str  # what the score is


class HistogramFigure(FigureKind):
    kind = "histogram"

    @staticmethod
    def draw(data: BlockScores) -> Figure:
        held, colour = data.scores, BLOCKS[data.block % len(BLOCKS)]
        drawing = figure(4.2, 2.1)
        axes = drawing.subplots()
        edges = np.linspace(held.low, held.high, len(held.shares) + 1)
        middle, width = (edges[:-1] + edges[1:]) / 2, (held.high - held.low) / len(held.shares)
        fired = middle > (np.inf if held.threshold is None else held.threshold)
        percent = 100 * np.array(held.shares)
        axes.bar(middle[~fired], percent[~fired], 0.9 * width, color=colour, alpha=0.35)
        axes.bar(middle[fired], percent[fired], 0.9 * width, color=colour)
        if held.threshold is not None and held.low <= held.threshold <= held.high:
            axes.axvline(held.threshold, color=INK)
        axes.set_xlabel(data.label)
        axes.set_ylabel("% of tokens")
        drawing.tight_layout()
        return drawing
