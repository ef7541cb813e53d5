"""Decode tokens/s against context, one line an architecture: from the JSON of `amor bench decode`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from amor.study.figures.canvas import BLOCKS, FAINT, INK, figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw(found: dict[str, Any]) -> Figure:
    """found: what `amor bench decode --out FILE` wrote."""
    drawing = figure(5.2, 3.2)
    axes = drawing.add_axes((0.11, 0.14, 0.58, 0.76))
    labels = list(dict.fromkeys(c["label"] for c in found["curves"]))
    for number, label in enumerate(labels):
        points = sorted((c["context"], c["tokens_per_second"]) for c in found["curves"] if c["label"] == label)
        gated = " f=" in label
        axes.plot(
            [c / 1024 for c, _ in points],
            [t for _, t in points],
            color=BLOCKS[number % len(BLOCKS)] if gated or number < len(BLOCKS) else FAINT,
            linewidth=1.8 if gated else 1.0,
            linestyle="-" if gated else ("--", "-.", ":")[number % 3],
            marker="o",
            markersize=2.5,
            label=label,
        )
    for one in found["crossings"]:
        if one["measured"]:
            axes.axvline(one["measured"] / 1024, color=FAINT, linewidth=0.6, linestyle=":")
    axes.set_xscale("log", base=2)
    ticks = sorted({c["context"] / 1024 for c in found["curves"]})
    axes.set_xticks(ticks, [f"{t:g}K" for t in ticks])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("context, tokens", color=INK)
    axes.set_ylabel("tokens/s", color=INK)
    axes.set_title(f"Decode at {found['scale']}, {found['machine']['threads']} threads, float32, one row", fontsize=8, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=6, loc="upper left", bbox_to_anchor=(1.01, 1.0))
    return drawing
