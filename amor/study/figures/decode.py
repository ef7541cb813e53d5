"""Decode tokens/s against context, one line per architecture: from the JSON of `amor bench decode`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from amor.records.bench import DecodeFile
from amor.study.figures.base import FigureKind
from amor.study.figures.canvas import BLOCKS, INK, beside, figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure


COLOURS = {"transformer": INK, "mamba2": BLOCKS[1], "gated-deltanet": BLOCKS[2]}  # by backbone
DASHES = {"serial": "--", "fused": "-.", "": ":"}  # of what is not gated
MARKERS = "osD^"  # of the firing rates, in order


class DecodeFigure(FigureKind):
    kind = "decode"

    @staticmethod
    def draw(found: DecodeFile) -> Figure:
        """found: what `amor bench decode --out FILE` wrote. Solid lines are gated."""
        drawing = figure(5.2, 3.2)
        axes = drawing.add_axes((0.11, 0.14, 0.58, 0.76))
        rates = sorted({c.rate for c in found.curves if c.gated})
        for label, (name, gated) in {c.label: (c.name, c.gated) for c in found.curves}.items():
            points = sorted((c.context, c.tokens_per_second, c.rate) for c in found.curves if c.label == label)
            backbone = next(b for b in ("gated-deltanet", "mamba2", "transformer") if b in name)
            axes.plot(
                [c / 1024 for c, _, _ in points],
                [t for _, t, _ in points],
                color=COLOURS[backbone],
                linewidth=1.6 if gated else 0.9,
                linestyle="-" if gated else DASHES[next(kind for kind in DASHES if kind in name)],
                marker=MARKERS[rates.index(points[0][2]) % len(MARKERS)] if gated else None,
                markersize=3,
                label=label,
            )
        axes.set_xscale("log", base=2)
        ticks = sorted({c.context / 1024 for c in found.curves})
        axes.set_xticks(ticks, [f"{t:g}K" for t in ticks])
        axes.set_ylim(bottom=0)
        axes.set_xlabel("context, tokens")
        axes.set_ylabel("tokens/s")
        axes.set_title(f"DecodeFile at {found.scale}, {found.machine.threads} threads, float32, one row")
        beside(axes)
        return drawing
