"""Accuracy against firing rate: each model with its gates closed, as they are and open. A model without gates is a level."""

from __future__ import annotations

from typing import TYPE_CHECKING

from amor.errors import AmorError
from amor.study import evals
from amor.study.eval_tables import SuiteRows, level
from amor.study.figures.base import FigureKind
from amor.study.figures.canvas import BLOCKS, INK, beside, figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MARKERS = {"closed": "v", "model": "o", "open": "^"}
WORDS = {"closed": "gates closed", "model": "gates of the model", "open": "gates open"}


class AccuracyFigure(FigureKind):
    kind = "accuracy"
    suites = ("common-sense", "retrieval", "niah", "longbench")

    @staticmethod
    def draw(suite_rows: SuiteRows) -> Figure:
        """Of tasks that every row has, so that points differ in nothing but the model and its gates."""
        known = evals.columns(suite_rows.name, suite_rows.rows)
        columns = [c for c in known if c.percent and all(row.score(c) for row in suite_rows.rows)]
        if not columns:
            raise AmorError(f"{suite_rows.rows[0].file}: no task that every row has, so there is no average to draw")
        drawing = figure(4.6, 3.0)
        axes = drawing.add_axes((0.12, 0.15, 0.52, 0.74))
        folders = list(dict.fromkeys(row.file.parent for row in suite_rows.rows))
        for number, folder in enumerate(folders):
            mine = [(label, row) for label, row in zip(suite_rows.labels, suite_rows.rows) if row.file.parent == folder]
            colour, name = BLOCKS[number % len(BLOCKS)], next(label for label, row in mine if row.gates == "model")
            points = [(rate, *level(row, columns), MARKERS[row.gates]) for _, row in mine if (rate := row.rate) is not None]
            points.sort(key=lambda point: point[0])
            if not points:
                axes.axhline(level(mine[0][1], columns)[0], color=colour, linewidth=1.0, linestyle=(0, (4, 2)), label=name)
                continue
            axes.plot([p[0] for p in points], [p[1] for p in points], color=colour, linewidth=1.1, label=name)
            for rate, value, error, mark in points:
                axes.errorbar(rate, value, yerr=error, color=colour, marker=mark, markersize=5, elinewidth=0.8, zorder=3)
        for gates, mark in MARKERS.items():
            axes.plot([], [], color=INK, marker=mark, linestyle="", markersize=4.5, label=WORDS[gates])
        axes.set_xlim(-0.04, 1.04)
        axes.set_xlabel("firing rate, mean of blocks")
        axes.set_ylabel(f"accuracy, mean of {len(columns)} (%)")
        axes.set_title(f"{suite_rows.name}; bars are one standard error")
        beside(axes)
        return drawing
