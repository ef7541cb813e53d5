"""Decode tokens/s against context, one line per architecture: from the JSON of
`amor bench decode`."""

from typing import Any

from amor.records.bench import DecodeFile
from amor.study.figures.base import FigureKind
from amor.study.figures.canvas import BLOCKS, INK, Figure, beside, figure, marker

# by backbone; the first whose name occurs in that of the architecture
COLOURS = {"gated-deltanet": BLOCKS[2], "mamba2": BLOCKS[1], "transformer": INK}
DASHES = {"serial": "--", "fused": "-.", "": ":"}  # of what is not gated, in the same way


class DecodeFigure(FigureKind):
    """Solid lines are gated, with a marker per firing rate."""

    kind = "decode"

    @staticmethod
    def draw(data: DecodeFile) -> Figure:
        """data: what `amor bench decode --out FILE` wrote."""
        drawing = figure(5.2, 3.2)
        axes = drawing.add_axes((0.11, 0.14, 0.58, 0.76))
        rates = sorted({point.rate for point in data.curves if point.gated})
        for label in dict.fromkeys(point.label for point in data.curves):
            points = sorted(
                (point for point in data.curves if point.label == label), key=lambda p: p.context
            )
            first = points[0]
            style: dict[str, Any] = {"linewidth": 0.9, "linestyle": _first_in(first.name, DASHES)}
            if first.gated:
                style = {"linewidth": 1.6, "marker": marker(rates.index(first.rate))}
            contexts = [point.context / 1024 for point in points]
            speeds = [point.tokens_per_second for point in points]
            line = _first_in(first.name, COLOURS)
            axes.plot(contexts, speeds, color=line, label=label, **style)
        axes.set_xscale("log", base=2)
        ticks = sorted({point.context / 1024 for point in data.curves})
        axes.set_xticks(ticks, [f"{tick:g}K" for tick in ticks])
        axes.set_ylim(bottom=0)
        axes.set_xlabel("context, tokens")
        axes.set_ylabel("tokens/s")
        axes.set_title(f"Decode at {data.scale}, {data.machine.threads} threads, float32, one row")
        beside(axes)
        return drawing


def _first_in(name: str, styles: dict[str, str]) -> str:
    return next(style for part, style in styles.items() if part in name)
