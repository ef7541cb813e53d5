"""Line charts and histograms as SVG text, drawn with nothing but arithmetic; colours come from the page they stand in."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise

WIDTH, HEIGHT = 480, 240
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 12, 34
POINTS = 400  # drawn a line at most; longer ones are averaged


@dataclass(frozen=True)
class Line:
    """A series: x and y; `colour` numbers the page's palette; style "thin", "line", "dots" or "dashed"."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    colour: int = 0
    style: str = "line"


@dataclass(frozen=True)
class Band:
    """The region between two series."""

    name: str
    x: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]
    colour: int = 0


@dataclass(frozen=True)
class Chart:
    """What is drawn between two axes."""

    title: str
    y_label: str = ""
    x_label: str = "step"
    lines: Sequence[Line] = ()
    bands: Sequence[Band] = ()
    zero: bool = False  # the y axis begins at 0
    log: bool = False
    y_range: tuple[float, float] | None = None
    marks: Sequence[tuple[float, str]] = field(default_factory=tuple)  # horizontal lines with a name


def line_chart(chart: Chart) -> str:
    """The chart as <svg>; a legend below names every series and its last value."""
    lines = [Line(s.name, *thinned(s.x, s.y), s.colour, s.style) for s in chart.lines if s.x]
    bands = [b for b in chart.bands if b.x]
    xs = [x for s in lines for x in s.x] + [x for b in bands for x in b.x]
    if not xs:
        return f'<p class="none">{escape(chart.title)}: nothing was measured.</p>'
    ys = [y for s in lines for y in s.y] + [y for b in bands for y in (*b.low, *b.high)] + [y for y, _ in chart.marks]
    plane = Plane((min(xs), max(max(xs), min(xs) + 1)), chart.y_range or reach(ys, chart.zero, chart.log), chart.log)
    parts = [plane.axes(chart.x_label)]
    parts += [plane.band(b) for b in bands]
    parts += [plane.mark(y, name) for y, name in chart.marks]
    parts += [plane.line(s) for s in lines]
    named: list[tuple[str, int, str, float | None]] = [(s.name, s.colour, s.style, s.y[-1]) for s in lines if s.style != "thin"]
    named += [(b.name, b.colour, "band", None) for b in bands[:1]]
    return figure(chart.title, chart.y_label, "".join(parts), legend(named))


def bar_chart(
    title: str, low: float, high: float, shares: Sequence[float], x_label: str, threshold: float | None, colour: int = 0
) -> str:
    """A histogram; what lies beyond the threshold is drawn in full colour, the rest pale."""
    plane = Plane((low, high), (0.0, max(max(shares) * 1.08, 1e-9)), False)
    width = (high - low) / len(shares)
    parts = [plane.axes(x_label, percent=True)]
    for index, share in enumerate(shares):
        left = low + index * width
        fired = threshold is not None and left + width / 2 > threshold
        x, y = plane.x(left), plane.y(share)
        size = f'x="{x:.1f}" y="{y:.1f}" width="{plane.x(left + width) - x - 0.6:.1f}" height="{max(plane.bottom - y, 0):.1f}"'
        parts.append(f'<rect class="f{colour}{"" if fired else " pale"}" {size}/>')
    if threshold is not None:
        x = min(max(plane.x(threshold), LEFT), WIDTH - RIGHT)
        end, shift = ("end", -5) if x > WIDTH / 2 else ("start", 5)
        parts.append(f'<line class="threshold" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{plane.bottom}"/>')
        parts.append(f'<text class="threshold" x="{x + shift:.1f}" y="{TOP + 10}" text-anchor="{end}">τ {threshold:.3f}</text>')
    return figure(title, "share of tokens", "".join(parts), "")


class Plane:
    """Data coordinates to places in the picture, and what is drawn in them."""

    def __init__(self, x: tuple[float, float], y: tuple[float, float], log: bool):
        self.xs, self.ys, self.log = x, y, log
        self.bottom = HEIGHT - BOTTOM

    def x(self, value: float) -> float:
        low, high = self.xs
        return LEFT + (value - low) / (high - low) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        low, high = self.ys
        if self.log:
            low, high, value = math.log(low), math.log(high), math.log(max(value, 1e-30))
        return self.bottom - (value - low) / (high - low) * (self.bottom - TOP)

    def axes(self, x_label: str, percent: bool = False) -> str:
        parts = []
        for value in powers(*self.ys) if self.log else ticks(*self.ys, 5):
            y = self.y(value)
            words = f"{100 * value:g} %" if percent else short(value)
            parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{words}</text>')
        for value in ticks(*self.xs, 5):
            parts.append(f'<text x="{self.x(value):.1f}" y="{self.bottom + 16}" text-anchor="middle">{short(value)}</text>')
        parts.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{self.bottom}" y2="{self.bottom}"/>')
        parts.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 3}" text-anchor="middle">{escape(x_label)}</text>')
        return "".join(parts)

    def place(self, x: float, y: float) -> str:
        low, high = self.ys
        return f"{self.x(x):.1f},{self.y(min(max(y, low), high)):.1f}"

    def line(self, line: Line) -> str:
        if line.style == "dots" or len(line.x) == 1:
            spots = (self.place(x, y).split(",") for x, y in zip(line.x, line.y))
            dots = "".join(f'<circle class="f{line.colour}" cx="{x}" cy="{y}" r="3.4"/>' for x, y in spots)
            return dots + self.path(line, "thin") if len(line.x) > 1 else dots
        return self.path(line, line.style)

    def path(self, line: Line, style: str) -> str:
        points = " ".join(self.place(x, y) for x, y in zip(line.x, line.y))
        return f'<polyline class="s{line.colour} {style}" points="{points}"/>'

    def band(self, band: Band) -> str:
        x, low = thinned(band.x, band.low)
        _, high = thinned(band.x, band.high)
        points = [self.place(a, b) for a, b in zip(x, high)] + [self.place(a, b) for a, b in zip(x[::-1], low[::-1])]
        return f'<polygon class="f{band.colour} band" points="{" ".join(points)}"/>'

    def mark(self, value: float, name: str) -> str:
        y = self.y(value)
        line = f'<line class="mark" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        return line + f'<text class="mark" x="{WIDTH - RIGHT}" y="{y - 5:.1f}" text-anchor="end">{escape(name)}</text>'


def figure(title: str, y_label: str, inside: str, below: str) -> str:
    caption = f"<b>{escape(title)}</b>" + (f" <small>{escape(y_label)}</small>" if y_label else "")
    svg = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">{inside}</svg>'
    return f"<figure><figcaption>{caption}</figcaption>{svg}{below}</figure>"


def legend(named: Sequence[tuple[str, int, str, float | None]]) -> str:
    if len(named) < 2:
        return ""
    items = (
        f'<span><i class="k{colour} {style}"></i>{escape(name)}{"" if value is None else f" <b>{value:.4g}</b>"}</span>'
        for name, colour, style, value in named
    )
    return f'<p class="legend">{"".join(items)}</p>'


def thinned(x: Sequence[float], y: Sequence[float]) -> tuple[list[float], list[float]]:
    """At most POINTS points, each the mean of its neighbours."""
    if len(x) <= POINTS:
        return list(x), list(y)
    edges = [round(i * len(x) / POINTS) for i in range(POINTS + 1)]
    pieces = list(pairwise(edges))
    return [sum(x[a:b]) / (b - a) for a, b in pieces], [sum(y[a:b]) / (b - a) for a, b in pieces]


def reach(values: Sequence[float], zero: bool, log: bool = False) -> tuple[float, float]:
    """From the least to the greatest, with a little room; never empty."""
    low, high = min(values), max(values)
    if log:
        low, high = max(low, 1e-12), max(high, 1e-12)
        return (low / 1.1, high * 1.1) if high / low > 1.2 else (low / 2, high * 2)
    room = (high - low) * 0.05 or abs(high) * 0.1 or 1.0
    return min(low, 0.0) if zero else low - room, high + room


def ticks(low: float, high: float, count: int) -> list[float]:
    """Round numbers between two ends, about `count` of them."""
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough)
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 12) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def powers(low: float, high: float) -> list[float]:
    """Ticks of a logarithmic axis: 1, 2, 5 of every power of ten in reach, thinned where there are many."""
    found = [m * 10.0**p for p in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1) for m in (1, 2, 5)]
    inside = [v for v in found if low <= v <= high]
    return inside if len(inside) <= 7 else [v for v in inside if f"{v:.0e}".startswith("1")]


def short(value: float) -> str:
    """1500 -> 1.5k, 0.0003 -> 3e-4: a tick has little room."""
    size = abs(value)
    if size >= 1e6:
        return f"{value / 1e6:g}M"
    if size >= 1e4:
        return f"{value / 1e3:g}k"
    if 0 < size < 1e-3:
        return f"{value:.1e}".replace("e-0", "e-").replace(".0e", "e")
    return f"{value:g}"
