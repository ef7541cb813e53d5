"""Nats saved against firing rate: every gate of a study at the same rates, chance and the oracle of the first below and above."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from amor.study.figures.canvas import BLOCKS, FAINT, figure
from amor.study.results import Results

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MARKS = "osv^DPX*"


def draw(held: Results) -> Figure:
    drawing = figure(8.4, 2.8)
    near, far = drawing.subplots(1, 2)
    gated = [row for row in held.ledger.rows if held.of(row, "rates")]
    for number, row in enumerate(gated):
        style: dict[str, Any] = {"color": BLOCKS[number % len(BLOCKS)], "marker": MARKS[number % len(MARKS)], "label": row}
        for axes in (near, far):
            line(axes, held, row, "gate", style)
    for row in gated[:1]:
        for axes in (near, far):
            line(axes, held, row, "random", {"color": FAINT, "marker": "s", "label": f"chance, {row}", "linestyle": "--"})
        line(far, held, row, "oracle", {"color": FAINT, "marker": "^", "label": f"oracle, {row}", "linestyle": ":"})
    for axes, title in ((near, "gates and chance"), (far, "and the oracle, who knows the next token")):
        axes.set_title(title, fontsize=8)
        axes.set_xlabel("firing rate")
        axes.set_ylabel("saved over never firing (nats a token)")
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=7)
    far.legend(fontsize=6, frameon=False, loc="upper left", bbox_to_anchor=(1.01, 1.0))  # beside the last one, for both
    drawing.tight_layout(w_pad=1.6)
    return drawing


def line(axes: Axes, held: Results, row: str, policy: str, style: dict[str, Any]) -> None:
    found = [(rate, grid) for rate in held.rates if (grid := held.saved(row, policy, rate)) is not None]
    if found:
        values, errors = [grid.mean for _, grid in found], [grid.error for _, grid in found]
        options: dict[str, Any] = {"markersize": 3, "linewidth": 1.1, "elinewidth": 0.6, "capsize": 1.5}
        axes.errorbar([rate for rate, _ in found], values, yerr=errors, **options, **style)
