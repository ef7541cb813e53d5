"""A traced text in the terminal: tokens coloured by entropy, and under each the blocks that fired on it.

Without colours the row `H` says the same: the tenths of the entropy, 0 to 9.
"""

from collections.abc import Iterator, Sequence

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from amor.records.trace import Token, Trace
from amor.study.figures.canvas import BLOCKS, ENTROPY
from amor.study.table import Cell, Table, TableRow, as_text

LABEL = 8  # columns before every row
FIRED, SKIPPED = "●", "·"


def show(console: Console, found: Trace) -> None:
    """One trace: its strip, its losses, and a table by class of token."""
    if found.title:
        console.print(Text(found.title, style="bold"))
    strip(console, found)
    console.print(losses(found), highlight=False)
    print(as_text(classes(found), console.is_terminal))


def strip(console: Console, found: Trace) -> None:
    """The tokens on as many lines as they take, each line with its entropies and the blocks that fired."""
    values = [entropy(token) for token in found.tokens]
    low, high = min(values), max(values)
    for line in lines(found.tokens, console.width - LABEL):
        tokens = Text(" " * LABEL)
        digits = Text("H".ljust(LABEL), style="dim")
        rows = [Text(f"block {k}".ljust(LABEL), style=BLOCKS[k % len(BLOCKS)]) for k in range(found.blocks)]
        for token in line:
            word = shown(token.text)
            tokens.append(word, style=f"#111111 on {shade(entropy(token), low, high)}")
            digits.append(str(min(int(entropy(token) * 10), 9)).center(cell_len(word)))
            for row, fired in zip(rows, token.fire):
                row.append((FIRED if fired else SKIPPED).center(cell_len(word)), style="" if fired else "dim")
        for row in (tokens, digits, *rows, Text()):
            console.print(row, no_wrap=True, crop=True)


def entropy(token: Token) -> float:
    return (token.entropy or (token.final_entropy,))[0]


def shade(value: float, low: float, high: float) -> str:
    """The colour of an entropy, between the lightest and the darkest of the scale."""
    place = (value - low) / max(high - low, 1e-9) * (len(ENTROPY) - 1)
    below = min(int(place), len(ENTROPY) - 2)
    pair = (ENTROPY[below], ENTROPY[below + 1])
    ends = [[int(colour[i : i + 2], 16) for i in (1, 3, 5)] for colour in pair]
    return "#" + "".join(f"{round(a + (b - a) * (place - below)):02x}" for a, b in zip(*ends))


def shown(text: str) -> str:
    """A token in a terminal: one that would move the cursor is made visible."""
    made = "".join("⏎" if c == "\n" else "⇥" if c == "\t" else c if c.isprintable() else "?" for c in text)
    return made or "∅"


def lines(tokens: Sequence[Token], width: int) -> Iterator[list[Token]]:
    """Tokens on lines of a width; a line of the text ends one here too."""
    line: list[Token] = []
    used = 0
    for token in tokens:
        size = cell_len(shown(token.text))
        if line and used + size > width:
            yield line
            line, used = [], 0
        line.append(token)
        used += size
        if token.text.endswith("\n"):
            yield line
            line, used = [], 0
    if line:
        yield line


def losses(found: Trace) -> str:
    """What attention changed, over the whole text."""
    loss, scored = found.loss, [t.p for t in found.tokens if t.p]
    if loss.as_is is None or loss.closed is None or loss.open is None:
        return "one token: nothing to predict"
    if not found.blocks:
        return f"nats per token: {loss.as_is:.3f} over {len(scored)} tokens; this model has no gated blocks"
    better = sum(p.as_is > p.closed for p in scored)
    worse = sum(p.as_is < p.closed for p in scored)
    rates = " / ".join(f"{100 * rate:.0f} %" for rate in found.fire_rate)
    return (
        f"fired on {rates} of tokens\n"
        f"nats per token: {loss.as_is:.3f} as it is, {loss.closed:.3f} all closed, {loss.open:.3f} all open\n"
        f"attention raised the probability of {better} tokens and lowered that of {worse}, of {len(scored)}"
    )


def classes(found: Trace) -> Table:
    """Entropy, firing rates and surprise by class of token."""
    rows = []
    for row in found.summary:
        mean = Cell(row.entropy[0], digits=2) if row.entropy else None
        fires = (f"{100 * rate:.0f} %" for rate in row.fire_rate)
        surprise = None if row.surprise is None else Cell(row.surprise, digits=2)
        rows.append(TableRow(row.name, (f"{row.count:,}", mean, *fires, surprise)))
    columns = ("tokens", "entropy", *(f"fires {k}" for k in range(found.blocks)), "surprise")
    return Table("By class of token", "class of token", columns, tuple(rows))
