"""The gate-fire pattern of a text, after the paper's teaser: its tokens, where each block fired,
and the entropy.

Everything is laid out by hand in points on one sheet, because the columns are as wide as their
words.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from amor.records.trace import Token, Trace, Traces
from amor.study.figures.base import FigureKind
from amor.study.figures.canvas import DASHED, FAINT, INK, Axes, Figure, colour, figure, heat

WIDTH = 504.0  # points: the text width of a page, 7 inches; a short text takes less
LEFT, RIGHT, TOP, BOTTOM = 46.0, 8.0, 6.0, 12.0  # BOTTOM holds the legend
TITLE, STRIP, ROW, CURVE, GAP = 16.0, 15.0, 9.0, 52.0, 14.0
LEGEND = 330.0  # points it takes
FONT = 7.5
MOST = 400  # tokens drawn of one text
VISIBLE = {" ": "␣", "\n": "⏎", "\t": "⇥"}


@dataclass(frozen=True)
class TokenBox:
    """One token on the sheet."""

    token: Token
    left: float
    width: float

    @property
    def middle(self) -> float:
        """Centre of the box, in points."""
        return self.left + self.width / 2

    @property
    def right(self) -> float:
        """Right edge of the box, in points."""
        return self.left + self.width


class TraceFigure(FigureKind):
    """Traces below each other, each under its title."""

    kind = "trace"

    @staticmethod
    def draw(data: Traces) -> Figure:
        """A figure of one or more traces, each under its title."""
        traces = data.traces
        systems = [(one, lines(one.tokens[:MOST])) for one in traces]
        tall = TOP + sum(TITLE + len(rows) * (height(one) + GAP) for one, rows in systems) + BOTTOM
        wide = RIGHT + max(LEFT + LEGEND, *(row[-1].right for _, rows in systems for row in rows))
        drawing = figure(wide / 72, tall / 72)
        sheet = drawing.add_axes((0, 0, 1, 1))
        sheet.set(xlim=(0, wide), ylim=(tall, 0))
        sheet.axis("off")
        scale = span(traces)
        y = TOP
        for one, rows in systems:
            sheet.text(
                LEFT, y + 8, heading(one), fontsize=8.5, color=INK, va="center", weight="bold"
            )
            y += TITLE
            for cells in rows:
                system(sheet, one, cells, y, scale)
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
    return "".join(
        VISIBLE.get(letter, letter if letter.isprintable() else f"\\x{ord(letter):02x}")
        for letter in core
    )


@cache
def text_width(text: str) -> float:
    """Points that a text takes."""
    from matplotlib.textpath import TextPath

    return (
        float(TextPath((0, 0), text.replace("$", r"\$"), size=FONT).get_extents().width)
        if text.strip()
        else 0.0
    )


def span(traces: Sequence[Trace]) -> tuple[float, float]:
    """Lowest and highest entropy drawn, in steps of a tenth."""
    values = [h for trace in traces for token in trace.tokens[:MOST] for h in entropies(token)]
    values += [t for trace in traces for t in thresholds(trace)]
    low, high = int(min(values) * 10) / 10, -int(-max(values) * 10 - 0.999) / 10
    return (low, high) if high > low else (low, low + 0.1)


def entropies(token: Token) -> tuple[float, ...]:
    """One per block; of a model without blocks that of the head."""
    return token.entropy or (token.final_entropy,)


def thresholds(trace: Trace) -> list[float]:
    """Those that are compared with the entropy."""
    return [t for t in trace.thresholds if t is not None] if trace.gate == "entropy" else []


def system(
    sheet: Axes, trace: Trace, cells: Sequence[TokenBox], y: float, scale: tuple[float, float]
) -> None:
    """One line of text: the strip, a row of marks per block, and the curve below."""
    strip(sheet, cells, y, scale)
    y += STRIP + 4
    for block in range(trace.blocks):
        row = y + ROW * (block + 0.5)
        sheet.text(
            LEFT - 6,
            row,
            f"block {block}",
            fontsize=6.5,
            ha="right",
            va="center",
            color=colour(block),
        )
        marks(sheet, cells, block, row)
    curves(sheet, trace, cells, y + ROW * trace.blocks + 5, scale)


def strip(sheet: Axes, cells: Sequence[TokenBox], y: float, scale: tuple[float, float]) -> None:
    """The tokens, on the shade of the first block's entropy."""
    from matplotlib.patches import Rectangle

    for cell in cells:
        share = (entropies(cell.token)[0] - scale[0]) / (scale[1] - scale[0])
        sheet.add_patch(
            Rectangle(
                (cell.left, y),
                cell.width,
                STRIP,
                facecolor=heat(share),
                edgecolor="#c8c8c8",
                linewidth=0.4,
            )
        )
        word = printable(cell.token.text).replace("$", r"\$")
        sheet.text(
            cell.middle,
            y + STRIP / 2 + 0.3,
            word,
            fontsize=FONT,
            ha="center",
            va="center_baseline",
            color=INK,
        )


def marks(sheet: Axes, cells: Sequence[TokenBox], block: int, y: float) -> None:
    """A large dot where a block fired, a small one where it did not."""
    for fired, size, shade in ((True, 22, colour(block)), (False, 2.5, "#bdbdbd")):
        here = [cell.middle for cell in cells if cell.token.fire[block] is fired]
        sheet.scatter(here, [y] * len(here), s=size, color=shade, linewidths=0, zorder=3)


def curves(
    sheet: Axes, trace: Trace, cells: Sequence[TokenBox], y: float, scale: tuple[float, float]
) -> None:
    """Entropy and thresholds below the tokens; grey where a block fired."""
    from matplotlib.patches import Rectangle

    low, high = scale

    def place(h: float) -> float:
        return y + CURVE * (high - h) / (high - low)

    end = cells[-1].right
    for cell in cells:
        if any(cell.token.fire):
            sheet.add_patch(
                Rectangle(
                    (cell.left, y), cell.width, CURVE, facecolor="#efefef", linewidth=0, zorder=0
                )
            )
    for tick in (low, (low + high) / 2, high):
        sheet.plot([LEFT, end], [place(tick)] * 2, color="#e2e2e2", linewidth=0.4, zorder=1)
        sheet.text(
            LEFT - 6, place(tick), f"{tick:.2g}", fontsize=6.5, ha="right", va="center", color=FAINT
        )
    sheet.text(
        LEFT - 30,
        y + CURVE / 2,
        "entropy",
        fontsize=6.5,
        rotation=90,
        ha="center",
        va="center",
        color=INK,
    )
    for block in range(max(trace.blocks, 1)):
        shade = colour(block)
        values = [place(entropies(cell.token)[block]) for cell in cells]
        sheet.plot(
            [c.middle for c in cells],
            values,
            color=shade,
            linewidth=1.1,
            marker="o",
            markersize=1.8,
            zorder=4 - block / 10,
        )
    for block, threshold in enumerate(thresholds(trace)):
        shade = colour(block)
        sheet.plot(
            [LEFT, end],
            [place(threshold)] * 2,
            color=shade,
            linewidth=0.8,
            linestyle=DASHED,
            zorder=2,
        )


def legend(sheet: Axes, trace: Trace, y: float) -> None:
    """What the signs mean, on one line under everything."""
    from matplotlib.patches import Rectangle

    def word(x: float, text: str) -> None:
        sheet.text(x, y, text, fontsize=6.5, va="center", color=INK)

    for step in range(24):
        sheet.add_patch(
            Rectangle((LEFT + step, y - 3), 1.2, 6, facecolor=heat(step / 23), linewidth=0)
        )
    sheet.add_patch(Rectangle((LEFT, y - 3), 25, 6, fill=False, edgecolor="#c8c8c8", linewidth=0.4))
    word(LEFT + 29, "entropy of the next token / log V")
    if trace.blocks:
        sheet.scatter(
            [LEFT + 150, LEFT + 208], [y, y], s=[22, 2.5], color=[INK, FAINT], linewidths=0
        )
        word(LEFT + 156, "attention ran")
        word(LEFT + 213, "skipped")
    if thresholds(trace):
        sheet.plot([LEFT + 252, LEFT + 268], [y, y], color=INK, linewidth=0.8, linestyle=DASHED)
        word(LEFT + 272, "threshold")
