"""Decode tokens/s against context, one line per architecture: from the JSON of
`amor bench decode`."""

from typing import Any

from amor.records.bench import DecodeFile
from amor.study.figures.base import FigureKind
from amor.study.figures.canvas import BLOCKS, INK, Figure, below, figure, label, marker

# by backbone; the first whose name occurs in that of the architecture
COLOURS = {"gated-deltanet": BLOCKS[2], "mamba2": BLOCKS[1], "transformer": INK}
DASHES = {"serial": "--", "fused": "-.", "": ":"}  # of what is not gated, in the same way


class DecodeFigure(FigureKind):
    """Solid lines are gated, with a marker per firing rate."""

    kind = "decode"

    @staticmethod
    def draw(data: DecodeFile) -> Figure:
        """data: what `amor bench decode --out FILE` wrote."""
        drawing = figure(3.6)
        axes = drawing.subplots()
        rates = sorted({point.rate for point in data.curves if point.gated})
        for name in dict.fromkeys(point.label for point in data.curves):
            mine = [point for point in data.curves if point.label == name]
            points = sorted(mine, key=lambda point: point.context)
            first = points[0]
            style: dict[str, Any] = {"linewidth": 0.9, "linestyle": _first_in(first.name, DASHES)}
            if first.gated:
                style = {"linewidth": 1.6, "marker": marker(rates.index(first.rate))}
            pairs = [(point.context / 1024, point.tokens_per_second) for point in points]
            axes.plot(*zip(*pairs), color=_first_in(first.name, COLOURS), label=name, **style)
        axes.set_xscale("log", base=2)
        ticks = sorted({point.context / 1024 for point in data.curves})
        axes.set_xticks(ticks, [f"{tick:g}K" for tick in ticks])
        axes.set_ylim(bottom=0)
        title = f"Decode at {data.scale}, {data.machine.threads} threads, float32, one row"
        label(axes, "context (tokens)", "tokens per second", title)
        return below(drawing)


def _first_in(name: str, styles: dict[str, str]) -> str:
    return next(style for part, style in styles.items() if part in name)
