"""What a gate is worth, in three panels: loss against firing rate, entropy against gain, and what
it captures."""

from typing import Any

from amor.records.value import Value
from amor.study.figures.base import FigureKind
from amor.study.figures.canvas import (
    BLOCKS,
    DASHED,
    FAINT,
    INK,
    Axes,
    Figure,
    colour,
    figure,
)

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
        drawing = figure(7.2, 2.5)
        axes = drawing.subplots(1, 3, width_ratios=(1.15, 1, 0.85))
        curve(axes[0], value)
        calibration(axes[1], value)
        captured(axes[2], value)
        for letter, panel in zip("abc", axes, strict=True):
            panel.set_title(letter, loc="left", weight="bold", fontsize=9)
        drawing.tight_layout(w_pad=1.6)
        return drawing


def curve(axes: Axes, value: Value) -> None:
    """Loss against firing rate; the model as it is stands out, bars are one standard error of the
    saving's size."""
    for name, (shade, mark, words) in LINES.items():
        points = [
            (p.fire_rate, level.nll) for p in value.curve if (level := getattr(p, name)) is not None
        ]
        if points:
            axes.plot(*zip(*points), color=shade, marker=mark, label=words)
    here = value.losses.gate
    rate = sum(here.fire_rate) / len(here.fire_rate)
    star: dict[str, Any] = {
        "color": BLOCKS[1],
        "marker": "*",
        "markersize": 8,
        "linestyle": "",
        "label": "as it is",
    }
    axes.errorbar([rate], [here.nll], yerr=[here.saved_se], zorder=5, **star)
    axes.set_xlabel("firing rate, mean of blocks")
    axes.set_ylabel("loss (nats per token)")
    axes.legend()


def calibration(axes: Axes, value: Value) -> None:
    """The mean gain of firing in bins of entropy: a good gate's rises from left to right."""
    axes.axhline(0, color=INK, linewidth=0.6)
    for block, bins in enumerate(value.calibration):
        x, y, error = [b.entropy for b in bins], [b.gain for b in bins], [b.se or 0 for b in bins]
        shade = colour(block)
        axes.plot(
            x, y, color=shade, marker="o", markersize=2.5, linewidth=1.1, label=f"block {block}"
        )
        axes.errorbar(x, y, yerr=error, color=shade, linestyle="", elinewidth=0.7)
    axes.set_xlabel("entropy (ten equal groups)")
    axes.set_ylabel("gain of firing (nats)")
    axes.legend()


def captured(axes: Axes, value: Value) -> None:
    """Of the tokens the best choice would fire on, how many the gate fired on; chance is the firing
    rate."""
    rows = value.agreement
    for place, row in enumerate(rows):
        shade = colour(row.block)
        axes.bar(
            place,
            row.best or 0,
            0.62,
            yerr=row.best_se or 0,
            color=shade,
            error_kw={"linewidth": 0.8},
        )
        axes.plot(
            [place - 0.4, place + 0.4],
            [row.fire_rate] * 2,
            color=INK,
            linewidth=1.2,
            linestyle=DASHED,
        )
    axes.plot([], [], color=INK, linewidth=1.2, linestyle=DASHED, label="by chance")
    axes.set_xticks(range(len(rows)), [f"block {row.block}" for row in rows])
    axes.set_ylim(0, 1)
    axes.set_ylabel("overlap with the best tokens")
    axes.legend(loc="upper right")
