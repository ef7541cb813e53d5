"""Traces and the value of gates in the terminal.

A traced text has its tokens coloured by entropy, and under each the blocks that fired on it. The
row `H` gives the same without colours: the tenths of the entropy, 0 to 9.
"""

from collections.abc import Iterator, Sequence

from rich.cells import cell_len
from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from amor.records.trace import Token, Trace
from amor.records.value import Choosing, Value
from amor.study.figures.canvas import BLOCKS, ENTROPY
from amor.study.table import Cell, Table, TableRow, as_text
from amor.study.value import about, choices, curve, tables
from amor.study.verdict import sentences

LABEL = 8  # columns before every row
FIRED, SKIPPED = "●", "·"


def show_trace(console: Console, trace: Trace) -> None:
    """One trace: its strip, its losses, and a table by class of token."""
    if trace.title:
        console.print(Text(trace.title, style="bold"))
    show_strip(console, trace)
    console.print(losses(trace), highlight=False)
    print(as_text(classes(trace), console.is_terminal))


def show_strip(console: Console, trace: Trace) -> None:
    """The tokens on as many lines as they need, each line with its entropies and the blocks that
    fired."""
    values = [token.entropies[0] for token in trace.tokens]
    low, high = min(values), max(values)
    colours = [BLOCKS[k % len(BLOCKS)] for k in range(trace.blocks)]
    for line in lines(trace.tokens, console.width - LABEL):
        tokens = Text(" " * LABEL)
        digits = Text("H".ljust(LABEL), style="dim")
        rows = [Text(f"block {k}".ljust(LABEL), style=colour) for k, colour in enumerate(colours)]
        for token in line:
            word = printable(token.text)
            width = cell_len(word)
            entropy = token.entropies[0]
            tokens.append(word, style=f"#111111 on {shade(entropy, low, high)}")
            digits.append(str(min(int(entropy * 10), 9)).center(width))
            for row, fired in zip(rows, token.fire):
                row.append((FIRED if fired else SKIPPED).center(width), "" if fired else "dim")
        for row in (tokens, digits, *rows, Text()):
            console.print(row, no_wrap=True, crop=True)


def shade(value: float, low: float, high: float) -> str:
    """The colour of an entropy, between the lightest and the darkest of the scale."""
    place = (value - low) / max(high - low, 1e-9) * (len(ENTROPY) - 1)
    below = min(int(place), len(ENTROPY) - 2)
    ends = [[int(c[i : i + 2], 16) for i in (1, 3, 5)] for c in ENTROPY[below : below + 2]]
    return "#" + "".join(f"{round(a + (b - a) * (place - below)):02x}" for a, b in zip(*ends))


def printable(text: str) -> str:
    """A token for the terminal: characters that would move the cursor are replaced."""
    marks = {"\n": "⏎", "\t": "⇥"}
    return "".join(marks.get(c) or (c if c.isprintable() else "?") for c in text) or "∅"


def lines(tokens: Sequence[Token], width: int) -> Iterator[list[Token]]:
    """Tokens on lines of at most a width; a newline of the text also ends a line."""
    line: list[Token] = []
    used = 0
    for token in tokens:
        size = cell_len(printable(token.text))
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


def losses(trace: Trace) -> str:
    """What attention changed, over the whole text."""
    loss, scored = trace.loss, [t.p for t in trace.tokens if t.p]
    if loss.as_is is None or loss.closed is None or loss.open is None:
        return "one token: nothing to predict"
    nats = f"nats per token: {loss.as_is:.3f}"
    if not trace.blocks:
        return f"{nats} over {len(scored)} tokens; this model has no gated blocks"
    better = sum(p.as_is > p.closed for p in scored)
    worse = sum(p.as_is < p.closed for p in scored)
    rates = " / ".join(f"{100 * rate:.0f} %" for rate in trace.fire_rate)
    return (
        f"fired on {rates} of tokens\n"
        f"{nats} as it is, {loss.closed:.3f} all closed, {loss.open:.3f} all open\n"
        f"attention raised the probability of {better} tokens and lowered that of {worse}, "
        f"of {len(scored)}"
    )


def classes(trace: Trace) -> Table:
    """Entropy, firing rates and surprise by class of token."""
    rows = []
    for row in trace.summary:
        mean = Cell(row.entropy[0], digits=2) if row.entropy else None
        fires = (f"{100 * rate:.0f} %" for rate in row.fire_rate)
        surprise = None if row.surprise is None else Cell(row.surprise, digits=2)
        rows.append(TableRow(row.name, (f"{row.count:,}", mean, *fires, surprise)))
    columns = ("tokens", "entropy", *(f"fires {k}" for k in range(trace.blocks)), "surprise")
    return Table("By class of token", "class of token", columns, tuple(rows))


def show_value(console: Console, value: Value) -> None:
    """The verdict in sentences, then the tables it comes from."""
    console.print(Text(f"{value.model}: {about(value)}", style="bold"))
    for sentence in sentences(value):
        text = Text(sentence, style="yellow" if sentence.startswith("Poor") else "")
        console.print(Padding(text, (0, 0, 0, 2)))
    for table in (*tables(value), curve(value)):
        print("\n" + as_text(table, console.is_terminal))
    for note in value.notes:
        console.print(Text(note, style="dim"))


def show_choices(console: Console, compared: Choosing) -> None:
    """Other gates in front of the same attention."""
    text = compared.data
    source = f"{text.windows} windows of {text.context} tokens of {text.source}"
    console.print(Text(f"{compared.model}: {source}", style="bold"))
    for table in choices(compared):
        print(as_text(table, console.is_terminal) + "\n")
