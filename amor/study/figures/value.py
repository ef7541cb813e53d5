"""What a gate is worth, in three panels: loss against firing rate, entropy against gain, and what
it captures."""

from typing import Any

from amor.records.value import Value
from amor.study.figures import canvas
from amor.study.figures.base import FigureKind
from amor.study.figures.canvas import BLOCKS, DASHED, FAINT, INK, Axes, Figure, label

LINES = {
    "random": (FAINT, "s", "random"),
    "gate": (BLOCKS[0], "o", "gate"),
    "oracle": (BLOCKS[2], "^", "oracle"),
}


class ValueFigure(FigureKind):
    """Three panels of the account of one model."""

    kind = "value"

    @staticmethod
    def draw(value: Value) -> Figure:
        """Panels below each other, named a, b and c for a caption."""
        drawing = canvas.figure(6.2)
        parts = (curve, calibration, captured)
        for letter, part, panel in zip("abc", parts, canvas.panels(drawing, 3), strict=True):
            part(panel, value)
            panel.set_title(letter, weight="bold")
            panel.legend()
        drawing.tight_layout()
        return drawing


def curve(axes: Axes, value: Value) -> None:
    """Loss against firing rate; the model as it is stands out, bars are one standard error of the
    saving's size."""
    for name, (shade, mark, words) in LINES.items():
        levels = [(point.fire_rate, getattr(point, name)) for point in value.curve]
        points = [(rate, level.nll) for rate, level in levels if level is not None]
        if points:
            axes.plot(*zip(*points), color=shade, marker=mark, label=words)
    here = value.losses.gate
    rate = sum(here.fire_rate) / len(here.fire_rate)
    star: dict[str, Any] = {"color": BLOCKS[1], "fmt": "*", "markersize": 8, "zorder": 5}
    axes.errorbar([rate], [here.nll], yerr=[here.saved_se], label="as it is", **star)
    label(axes, "firing rate, mean of blocks", "loss (nats per token)")


def calibration(axes: Axes, value: Value) -> None:
    """The mean gain of firing in bins of entropy: a good gate's rises from left to right."""
    axes.axhline(0, color=INK, linewidth=0.6)
    for block, bins in enumerate(value.calibration):
        x, y, se = [b.entropy for b in bins], [b.gain for b in bins], [b.se or 0 for b in bins]
        style: dict[str, Any] = {"color": canvas.colour(block), "fmt": "o-", "markersize": 2.5}
        axes.errorbar(x, y, se, elinewidth=0.7, label=f"block {block}", **style)
    label(axes, "entropy (ten equal groups)", "gain of firing (nats)")


def captured(axes: Axes, value: Value) -> None:
    """Of the tokens the best choice would fire on, how many the gate fired on; chance is the firing
    rate."""
    rows = value.agreement
    chance: dict[str, Any] = {"color": INK, "linestyle": DASHED}
    for place, row in enumerate(rows):
        axes.bar(place, row.best or 0, 0.62, color=canvas.colour(row.block))
        axes.errorbar(place, row.best or 0, row.best_se or 0, color=INK, elinewidth=0.8)
        axes.plot([place - 0.4, place + 0.4], [row.fire_rate] * 2, **chance)
    axes.plot([], [], label="by chance", **chance)
    axes.set_xticks(range(len(rows)), [str(row.block) for row in rows])
    axes.set_ylim(0, 1)
    label(axes, "block", "overlap with the best tokens")
