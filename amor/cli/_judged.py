"""Gate value accounting in the terminal: what was found in sentences, then the tables they come from."""

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from amor.judge.choosing import PAPER
from amor.records.value import Choosing, Saved, Value
from amor.study.page import about, tables
from amor.study.verdict import sentences


def show(console: Console, found: Value) -> None:
    console.print(Text(f"{found.model}: {about(found)}", style="bold"))
    for sentence in sentences(found):
        console.print(Padding(Text(sentence, style="yellow" if sentence.startswith("Poor") else ""), (0, 0, 0, 2)))
    for title, rows in tables(found).items():
        console.print()
        console.print(table(title, rows))
    console.print()
    console.print(table("Loss against firing rate", curve(found)))
    for note in found.notes:
        console.print(Text(note, style="dim"))


def show_choices(console: Console, found: Choosing) -> None:
    text = found.data
    console.print(Text(f"{found.model}: {text.windows} windows of {text.context} tokens of {text.source}", style="bold"))
    said = f"nats a token saved over never firing; as it is {saved(found.own)}, always {saved(found.always)}"
    rows = [["fires on the tokens of the highest", *(f"{rate:.0%}" for rate in found.rates)]]
    rows += [[choice.name, *map(saved, choice.levels)] for choice in found.choices]
    console.print(table(said, rows))
    console.print()
    rows = [rows[0], *([choice.name, *map(saved, choice.over_paper)] for choice in found.choices)]
    console.print(table(f"more than {PAPER}, the paper's gate", rows))


def saved(level: Saved) -> str:
    return f"{level.saved:.4f} ± {level.se:.4f}"


def curve(found: Value) -> list[list[str]]:
    rows = [["asked for", "fired on", "gate", "random", "oracle", "± se"]]
    for point in found.curve:
        losses = ["-" if level is None else f"{level.nll:.4f}" for level in (point.gate, point.random, point.oracle)]
        rows.append([f"{point.aim:g}", f"{point.fire_rate:.3f}", *losses, f"{point.oracle.se:.4f}"])
    return rows


def table(title: str, rows: list[list[str]]) -> Table:
    drawn = Table(title=title, title_justify="left", title_style="bold", box=None, header_style="dim", pad_edge=False)
    for number, head in enumerate(rows[0]):
        drawn.add_column(head, justify="left" if number == 0 else "right")
    for row in rows[1:]:
        drawn.add_row(*row)
    return drawn
