"""Nats saved against firing rate: every gate of a study at the same rates, chance and the oracle of
the first below and above."""

from typing import Any

from amor.measures.rates import saved
from amor.study.figures import canvas
from amor.study.figures.base import FigureKind
from amor.study.figures.canvas import FAINT, Axes, Figure, colour, marker
from amor.study.results import Results

TITLES = ("gates and chance", "and the oracle, which knows the next token")


class RatesFigure(FigureKind):
    """Gates and chance, and again with the oracle, whose scale is another."""

    kind = "rates"
    needs = frozenset({"rates"})

    @staticmethod
    def draw(results: Results) -> Figure:
        """One panel above the other."""
        drawing = canvas.figure(5.0)
        gated = list(results.by_row("rates"))
        near, far = canvas.panels(drawing, 2)
        for axes, title in zip((near, far), TITLES):
            for number, row in enumerate(gated):
                _line(axes, results, row, "gate", row, color=colour(number), marker=marker(number))
            for row in gated[:1]:
                _line(axes, results, row, "random", f"chance, {row}", fmt="s--", color=FAINT)
            canvas.label(axes, "firing rate", "saved (nats per token)", title)
        for row in gated[:1]:
            _line(far, results, row, "oracle", f"oracle, {row}", fmt="^:", color=FAINT)
        return canvas.below(drawing)


def _line(axes: Axes, results: Results, row: str, policy: str, name: str, **style: Any) -> None:
    points = [
        (rate, grid.mean, grid.error)
        for rate in results.options("rates").rates
        if (grid := saved(results, row, policy, rate)) is not None
    ]
    if points:
        x, y, error = zip(*points)
        axes.errorbar(x, y, error, elinewidth=0.6, capsize=1.5, label=name, **style)
