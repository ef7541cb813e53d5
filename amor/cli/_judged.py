"""Gate value accounting in the terminal: what was found in sentences, then the tables they come from."""

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from amor.records.value import Choosing, Value
from amor.study.table import as_text
from amor.study.value import about, choices, curve, tables
from amor.study.verdict import sentences


def show(console: Console, found: Value) -> None:
    console.print(Text(f"{found.model}: {about(found)}", style="bold"))
    for sentence in sentences(found):
        console.print(Padding(Text(sentence, style="yellow" if sentence.startswith("Poor") else ""), (0, 0, 0, 2)))
    for table in (*tables(found), curve(found)):
        print("\n" + as_text(table, console.is_terminal))
    for note in found.notes:
        console.print(Text(note, style="dim"))


def show_choices(console: Console, found: Choosing) -> None:
    text = found.data
    console.print(Text(f"{found.model}: {text.windows} windows of {text.context} tokens of {text.source}", style="bold"))
    for table in choices(found):
        print(as_text(table, console.is_terminal) + "\n")
