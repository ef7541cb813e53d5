"""Nats saved against firing rate: every gate of a study at the same rates, chance and the oracle of
the first below and above."""

from typing import Any

from amor.measures.rates import saved
from amor.study.figures.base import FigureKind
from amor.study.figures.canvas import FAINT, Axes, Figure, beside, colour, figure, marker
from amor.study.results import Results


class RatesFigure(FigureKind):
    """Gates and chance, and again with the oracle, whose scale is another."""

    kind = "rates"
    needs = frozenset({"rates"})

    @staticmethod
    def draw(results: Results) -> Figure:
        drawing = figure(8.4, 2.8)
        near, far = drawing.subplots(1, 2)
        gated = [row for row in results.ledger.rows if results.of(row, "rates")]
        for number, row in enumerate(gated):
            shade, mark = colour(number), marker(number)
            for axes in (near, far):
                _line(axes, results, row, "gate", {"color": shade, "marker": mark, "label": row})
        for row in gated[:1]:
            for axes in (near, far):
                _line(
                    axes,
                    results,
                    row,
                    "random",
                    {"color": FAINT, "marker": "s", "label": f"chance, {row}", "linestyle": "--"},
                )
            _line(
                far,
                results,
                row,
                "oracle",
                {"color": FAINT, "marker": "^", "label": f"oracle, {row}", "linestyle": ":"},
            )
        for axes, title in (
            (near, "gates and chance"),
            (far, "and the oracle, who knows the next token"),
        ):
            axes.set_title(title)
            axes.set_xlabel("firing rate")
            axes.set_ylabel("saved over never firing (nats per token)")
        beside(far)  # beside the last one, for both
        drawing.tight_layout(w_pad=1.6)
        return drawing


def _line(axes: Axes, results: Results, row: str, policy: str, style: dict[str, Any]) -> None:
    points = [
        (rate, grid)
        for rate in results.options("rates").rates
        if (grid := saved(results, row, policy, rate)) is not None
    ]
    if points:
        values, errors = [grid.mean for _, grid in points], [grid.error for _, grid in points]
        options: dict[str, Any] = {"elinewidth": 0.6, "capsize": 1.5}
        axes.errorbar([rate for rate, _ in points], values, yerr=errors, **options, **style)
