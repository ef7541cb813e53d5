"""Accuracy against firing rate: each model with its gates closed, as they are and open. A model
without gates is a level."""

from typing import Any

from amor.errors import AmorError
from amor.study import evals
from amor.study.eval_tables import SuiteRows, level
from amor.study.figures.base import FigureKind
from amor.study.figures.canvas import DASHED, INK, Figure, beside, colour, figure

MARKS = {"closed": "v", "model": "o", "open": "^"}
WORDS = {"closed": "gates closed", "model": "gates of the model", "open": "gates open"}


class AccuracyFigure(FigureKind):
    """One line per model, through the firing rates of its gates."""

    kind = "accuracy"
    suites = ("common-sense", "retrieval", "niah", "longbench")

    @staticmethod
    def draw(suite_rows: SuiteRows) -> Figure:
        """Of tasks that every row has, so that points differ only in the model and its gates."""
        rows = suite_rows.rows
        known = evals.columns(suite_rows.name, rows)
        columns = [c for c in known if c.percent and all(row.score(c) for row in rows)]
        if not columns:
            raise AmorError(
                f"{rows[0].file}: no task that every row has, so there is no average to draw"
            )
        drawing = figure(4.6, 3.0)
        axes = drawing.add_axes((0.12, 0.15, 0.52, 0.74))
        for number, folder in enumerate(dict.fromkeys(row.file.parent for row in rows)):
            mine = [
                (r, name) for r, name in zip(rows, suite_rows.labels) if r.file.parent == folder
            ]
            line: dict[str, Any] = {"color": colour(number)}
            name = next(name for row, name in mine if row.gates == "model")
            gated = sorted(
                (row for row, _ in mine if row.rate is not None), key=lambda row: row.rate or 0
            )
            if not gated:
                height = level(mine[0][0], columns)[0]
                axes.axhline(height, linewidth=1.0, linestyle=DASHED, label=name, **line)
                continue
            rates, levels = (
                [row.rate or 0.0 for row in gated],
                [level(row, columns) for row in gated],
            )
            axes.plot(rates, [value for value, _ in levels], label=name, **line)
            for row, rate, (value, error) in zip(gated, rates, levels):
                bar: dict[str, Any] = {
                    "marker": MARKS[row.gates],
                    "markersize": 5,
                    "elinewidth": 0.8,
                    "zorder": 3,
                }
                axes.errorbar(rate, value, yerr=error, **line, **bar)
        for gates, mark in MARKS.items():
            axes.plot([], [], mark, color=INK, markersize=4.5, label=WORDS[gates])
        axes.set_xlim(-0.04, 1.04)
        axes.set_xlabel("firing rate, mean of blocks")
        axes.set_ylabel(f"accuracy, mean of {len(columns)} (%)")
        axes.set_title(f"{suite_rows.name}; bars are one standard error")
        beside(axes)
        return drawing
