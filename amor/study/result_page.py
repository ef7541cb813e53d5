"""What a study ends in: its tables as text, Markdown and LaTeX, its figures, and one page that holds all of them."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from amor.errors import AmorError
from amor.files import replace_file
from amor.study import figures, html
from amor.study.results import Results
from amor.study.table import Table, as_cell, printed, remarks
from amor.study.tables import make_tables

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAGE, TABLES = "index.html", {"text": "tables.txt", "markdown": "tables.md", "latex": "tables.tex"}
FORMATS = (".svg", ".png")


def write(held: Results) -> list[Path]:
    """Every file, each written whole; figures where matplotlib is there, else the page says what they need."""
    made = make_tables(held)
    files = []
    for name, file in TABLES.items():
        replace_file(held.folder / file, "\n\n".join(printed(table, name) for table in made) + "\n")
        files.append(held.folder / file)
    drawn: dict[str, Figure] = {}
    trouble = ""
    try:
        drawn |= {name: figures.draw(name, held) for name in held.study.figures}
    except AmorError as error:
        trouble = str(error)
    for name, drawing in drawn.items():
        files += [figures.save(drawing, held.folder / f"{name}{ending}") for ending in FORMATS]
    inline = {name: figures.inline(drawing) for name, drawing in drawn.items()}
    replace_file(held.folder / PAGE, page(held, made, inline, trouble))
    return [*files, held.folder / PAGE]


def page(held: Results, made: list[Table], drawn: dict[str, str], trouble: str) -> str:
    name, there = held.ledger.name, sum(bool(one.results) for ones in held.shown.values() for one in ones)
    facts = {"rows": str(len(held.ledger.rows)), "runs": str(len(held.runs)), "seeds": str(len(held.study.seeds))}
    facts["runs that are judged"] = str(there)
    parts = [
        f'<h1>{escape(name)}</h1><p class="soft">{escape(held.study.title)}</p>',
        html.tiles(facts),
        *(
            html.section(table.title, _table(table), *(f'<p class="note">{escape(note)}</p>' for note in remarks(table, "*")))
            for table in made
        ),
        html.section("Figures", *(f"<figure>{svg}</figure>" for svg in drawn.values()), escape(trouble)),
        html.section("The study as it was run", html.folded("study.json", held.ledger)),
    ]
    return html.page(f"{name} - amor", "\n".join(parts))


def _table(table: Table) -> str:
    rows = []
    for heading, lines in table.groups():
        rows += [[heading, *([""] * len(table.columns))]] if heading else []
        rows += [[line.name, *(as_cell(cell, "*{}*".format) for cell in line.cells)] for line in lines]
    return html.table([table.first, *table.columns], rows)
