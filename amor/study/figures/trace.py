"""The gate-fire pattern of a text, after the paper's teaser: its tokens, where each block fired,
and the entropy.

Everything is laid out by hand in points on one sheet, because the columns are as wide as their
words.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

from amor.records.trace import Token, Trace, Traces
from amor.study.figures import canvas
from amor.study.figures.base import FigureKind
from amor.study.figures.canvas import DASHED, FAINT, INK, Axes, Figure, colour, heat

WIDTH = 72 * canvas.COLUMN  # points
LEFT, RIGHT, TOP, BOTTOM = 40.0, 4.0, 4.0, 24.0  # BOTTOM holds the legend, two lines
TITLE, STRIP, ROW, CURVE, GAP = 16.0, 14.0, 8.0, 40.0, 10.0
FONT = 7.0
SMALL: dict[str, Any] = {"fontsize": 6.5, "va": "center"}
PALE, EDGE = "#efefef", "#c8c8c8"
MOST = 400  # tokens drawn of one text
VISIBLE = {" ": "␣", "\n": "⏎", "\t": "⇥"}


class TokenBox(NamedTuple):
    """One token on the sheet, in points."""

    token: Token
    left: float
    width: float

    @property
    def middle(self) -> float:
        """Centre of the box."""
        return self.left + self.width / 2


class TraceFigure(FigureKind):
    """Traces below each other, each under its title."""

    kind = "trace"

    @staticmethod
    def draw(data: Traces) -> Figure:
        """A figure of one or more traces, each under its title."""
        traces = data.traces
        systems = [(one, lines(one.tokens[:MOST])) for one in traces]
        tall = TOP + sum(TITLE + len(rows) * (height(one) + GAP) for one, rows in systems) + BOTTOM
        drawing = canvas.figure(tall / 72)
        sheet = drawing.add_axes((0, 0, 1, 1))
        sheet.set(xlim=(0, WIDTH), ylim=(tall, 0))
        sheet.axis("off")
        y, scale = TOP, span(traces)
        for one, rows in systems:
            sheet.text(RIGHT, y + 6, heading(one), fontsize=8, va="center", weight="bold")
            y += TITLE
            for boxes in rows:
                system(sheet, one, boxes, y, scale)
                y += height(one) + GAP
        legend(sheet, traces[0], y)
        return drawing


def heading(trace: Trace) -> str:
    """The title of a trace."""
    cut = f" (first {MOST} tokens of {len(trace.tokens):,})" if len(trace.tokens) > MOST else ""
    return " · ".join(part for part in (trace.title, trace.model) if part) + cut


def height(trace: Trace) -> float:
    """Points that one line of a trace takes."""
    return STRIP + 4 + ROW * trace.blocks + 5 + CURVE


def lines(tokens: Sequence[Token]) -> list[list[TokenBox]]:
    """Tokens on as few lines as the sheet allows, and those as even as they can be."""
    fewest = broken(tokens, WIDTH - RIGHT)
    limit = LEFT + (WIDTH - RIGHT - LEFT) / 2
    while len(fewest) > 1 and limit < WIDTH - RIGHT:
        even = broken(tokens, limit)
        if len(even) == len(fewest):
            return even
        limit += 4
    return fewest


def broken(tokens: Sequence[Token], limit: float) -> list[list[TokenBox]]:
    """Tokens on lines that end before `limit`; a word begins with a little space before it."""
    rows: list[list[TokenBox]] = [[]]
    x = LEFT
    for token in tokens:
        gap = 2.5 if token.text[:1].isspace() and rows[-1] else 0.0
        wide = max(text_width(printable(token.text)) + 5, 11.0)
        if x + gap + wide > limit and rows[-1]:
            rows.append([])
            x, gap = LEFT, 0.0
        rows[-1].append(TokenBox(token, x + gap, wide))
        x += gap + wide
    return rows


def printable(text: str) -> str:
    """A token in print: the space before a word is left to the layout, other white space is made
    visible."""
    core = text.strip(" ") or text
    hexed: dict[str, str | int | None] = {
        letter: f"\\x{ord(letter):02x}" for letter in core if not letter.isprintable()
    }
    return core.translate(str.maketrans(hexed | VISIBLE))


@cache
def text_width(text: str) -> float:
    """Points that a text takes."""
    from matplotlib.textpath import TextPath

    if not text.strip():
        return 0.0
    return float(TextPath((0, 0), text.replace("$", r"\$"), size=FONT).get_extents().width)


def span(traces: Sequence[Trace]) -> tuple[float, float]:
    """Lowest and highest entropy drawn, in steps of a tenth."""
    values = [h for trace in traces for token in trace.tokens[:MOST] for h in token.entropies]
    values += [t for trace in traces for t in thresholds(trace)]
    low, high = int(min(values) * 10) / 10, -int(-max(values) * 10 - 0.999) / 10
    return (low, high) if high > low else (low, low + 0.1)


def thresholds(trace: Trace) -> list[float]:
    """Those that are compared with the entropy."""
    return [t for t in trace.thresholds if t is not None] if trace.gate == "entropy" else []


def system(
    sheet: Axes, trace: Trace, boxes: Sequence[TokenBox], y: float, scale: tuple[float, float]
) -> None:
    """One line of text: the strip, a row of marks per block, and the curve below."""
    strip(sheet, boxes, y, scale)
    y += STRIP + 4
    for block in range(trace.blocks):
        row = y + ROW * (block + 0.5)
        sheet.text(LEFT - 6, row, f"block {block}", ha="right", color=colour(block), **SMALL)
        # a large dot where the block fired, a small one where it did not
        for fired, size, shade in ((True, 22, colour(block)), (False, 2.5, FAINT)):
            here = [box.middle for box in boxes if box.token.fire[block] is fired]
            sheet.scatter(here, [row] * len(here), s=size, color=shade, linewidths=0, zorder=3)
    curves(sheet, trace, boxes, y + ROW * trace.blocks + 5, scale)


def rectangle(
    sheet: Axes, x: float, y: float, width: float, height: float, fill: Any, edge: str = "none"
) -> None:
    """A filled rectangle, in points."""
    from matplotlib.patches import Rectangle

    box = Rectangle((x, y), width, height, facecolor=fill, edgecolor=edge, linewidth=0.4, zorder=0)
    sheet.add_patch(box)


def strip(sheet: Axes, boxes: Sequence[TokenBox], y: float, scale: tuple[float, float]) -> None:
    """The tokens, on the shade of the first block's entropy."""
    for box in boxes:
        share = (box.token.entropies[0] - scale[0]) / (scale[1] - scale[0])
        rectangle(sheet, box.left, y, box.width, STRIP, heat(share), EDGE)
        word = printable(box.token.text).replace("$", r"\$")
        at: dict[str, Any] = {"ha": "center", "va": "center_baseline", "fontsize": FONT}
        sheet.text(box.middle, y + STRIP / 2 + 0.3, word, color=INK, **at)


def curves(
    sheet: Axes, trace: Trace, boxes: Sequence[TokenBox], y: float, scale: tuple[float, float]
) -> None:
    """Entropy and thresholds below the tokens; grey where a block fired."""
    low, high = scale

    def place(h: float) -> float:
        return y + CURVE * (high - h) / (high - low)

    for box in boxes:
        if any(box.token.fire):
            rectangle(sheet, box.left, y, box.width, CURVE, PALE)
    end = boxes[-1].left + boxes[-1].width
    for tick in (low, (low + high) / 2, high):
        sheet.plot([LEFT, end], [place(tick)] * 2, color=EDGE, linewidth=0.4, zorder=1)
        sheet.text(LEFT - 4, place(tick), f"{tick:.2g}", ha="right", color=FAINT, **SMALL)
    sheet.text(LEFT - 28, y + CURVE / 2, "entropy", rotation=90, ha="center", **SMALL)
    across = [box.middle for box in boxes]
    for block in range(max(trace.blocks, 1)):
        values = [place(box.token.entropies[block]) for box in boxes]
        line: dict[str, Any] = {"linewidth": 1.1, "markersize": 1.8, "zorder": 4 - block / 10}
        sheet.plot(across, values, "o-", color=colour(block), **line)
    for block, threshold in enumerate(thresholds(trace)):
        line = {"linewidth": 0.8, "linestyle": DASHED, "zorder": 2}
        sheet.plot([LEFT, end], [place(threshold)] * 2, color=colour(block), **line)


def legend(sheet: Axes, trace: Trace, y: float) -> None:
    """What the signs mean, on two lines under everything."""
    for step in range(24):
        rectangle(sheet, LEFT + step, y - 3, 1.2, 6, heat(step / 23))
    rectangle(sheet, LEFT, y - 3, 25, 6, "none", EDGE)
    sheet.text(LEFT + 29, y, "entropy of the next token / log V", **SMALL)
    y += 11
    if trace.blocks:
        places = [LEFT + 3, LEFT + 62]
        sheet.scatter(places, [y, y], s=[22, 2.5], color=[INK, FAINT], linewidths=0)
        sheet.text(LEFT + 9, y, "attention ran", **SMALL)
        sheet.text(LEFT + 67, y, "skipped", **SMALL)
    if thresholds(trace):
        sheet.plot([LEFT + 106, LEFT + 122], [y, y], color=INK, linewidth=0.8, linestyle=DASHED)
        sheet.text(LEFT + 126, y, "threshold", **SMALL)
