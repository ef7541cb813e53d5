"""The one table type, and how it is printed: text for terminals and files, Markdown, LaTeX and
HTML.

Text is laid out by rich, Markdown and LaTeX by tabulate, HTML by the macro of templates/base.html.
What bold and `=` mean is explained below every table in which they occur.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

FORMATS = ("text", "markdown", "latex")
BEST = "ahead of every other row of ours by more than two paired standard errors"
FLOOR = "within two paired standard errors of the floor"
ENDLESS = 100_000  # columns of the console that tables are laid out on: no cell is ever shortened


@dataclass(frozen=True)
class Cell:
    """A number with its standard error, rounded to `digits` after the point."""

    value: float
    error: float | None = None
    digits: int = 1
    best: bool = False  # bold: ahead of every other row of ours by more than two paired errors
    floor: bool = False  # marked `=`: within two paired errors of the floor


@dataclass(frozen=True)
class TableRow:
    """A name and one cell per column; None is printed as a dash, a text as it is."""

    name: str
    cells: tuple[Cell | str | None, ...]
    kind: Literal["ours", "floor", "paper"] = "ours"  # a rule separates rows of different kinds


@dataclass(frozen=True)
class Table:
    """Rows of cells under headings, whatever they are printed as."""

    title: str
    first: str  # head of the column of names
    columns: tuple[str, ...]
    lines: tuple[TableRow, ...]
    paper: str = ""  # heading above the rows of kind "paper"
    notes: tuple[str, ...] = ()  # printed below, one per line

    def groups(self) -> Iterator[tuple[str, list[TableRow]]]:
        """The rows in runs of one kind, each with its heading ("" where it needs none)."""
        for kind, rows in groupby(self.lines, key=lambda row: row.kind):
            yield self.paper if kind == "paper" else "", list(rows)


def as_number(value: float, digits: int) -> str:
    """A number with `digits` after the point; from 1e5 on in scientific notation."""
    return f"{value:.1e}" if abs(value) >= 1e5 else f"{value:,.{digits}f}"


def one_line(text: str) -> str:
    """A text from a file without line breaks and control characters, which would steer a
    terminal."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def as_cell(
    cell: Cell | str | None,
    bold: Callable[[str], str],
    escape: Callable[[str], str] = one_line,
    marks: tuple[str, str] = ("±", "="),
    dash: str = "-",
) -> str:
    """A cell as text. `escape` makes a text safe for the format; marks: of an error and of the
    floor."""
    if cell is None:
        return dash
    if isinstance(cell, str):
        return escape(cell)
    value = as_number(cell.value, cell.digits)
    error = "" if cell.error is None else marks[0] + as_number(cell.error, cell.digits)
    return (bold(value) if cell.best else value) + error + (marks[1] if cell.floor else "")


def remarks(table: Table, bold: str) -> list[str]:
    """What the marks of this table mean, then its notes. bold: how a best value is marked in this
    format."""
    cells = [cell for row in table.lines for cell in row.cells if isinstance(cell, Cell)]
    known = {
        "±: one standard error": any(cell.error is not None for cell in cells),
        f"{bold}: {BEST}": any(cell.best for cell in cells),
        f"=: {FLOOR}": any(cell.floor for cell in cells),
    }
    return [*(words for words, used in known.items() if used), *table.notes]


def as_text(table: Table, terminal: bool = False) -> str:
    """For people: bold letters on a terminal, *stars* elsewhere."""
    from rich import box
    from rich import table as rich_table
    from rich.console import Console
    from rich.text import Text

    rules = box.Box("    \n    \n -- \n    \n -- \n -- \n    \n    \n", ascii=True)
    laid_out = rich_table.Table(box=rules, show_edge=False, pad_edge=False, header_style="")
    laid_out.add_column(Text(one_line(table.first)), no_wrap=True)
    for head in table.columns:
        laid_out.add_column(Text(one_line(head)), justify="right", no_wrap=True)
    bold = "\033[1m{}\033[0m".format if terminal else "*{}*".format
    for heading, rows in table.groups():
        laid_out.add_section()
        if heading:
            laid_out.add_row(Text(one_line(heading)))
        for row in rows:
            cells = [Text.from_ansi(as_cell(cell, bold)) for cell in row.cells]
            laid_out.add_row(Text(one_line(row.name)), *cells)
    file, colours = io.StringIO(), "standard" if terminal else None
    console: Any = {"force_terminal": terminal, "color_system": colours}
    Console(file=file, width=ENDLESS, **console).print(laid_out)
    body = [line.rstrip() for line in file.getvalue().rstrip("\n").split("\n")]
    below = [one_line(note) for note in remarks(table, "bold" if terminal else "*")]
    return "\n".join([one_line(table.title), *body, *(["", *below] if below else [])])


def as_markdown(table: Table) -> str:
    """A pipe table below its title, with its notes as a list."""
    from tabulate import tabulate

    rows = []
    for heading, group in table.groups():
        rows += [[f"*{escape_markdown(heading)}*", *([""] * len(table.columns))]] if heading else []
        for row in group:
            cells = (as_cell(cell, "**{}**".format, escape_markdown) for cell in row.cells)
            rows.append([escape_markdown(row.name), *cells])
    heads = [escape_markdown(head) for head in (table.first, *table.columns)]
    body = tabulate(rows, heads, "pipe", **aligned(table))
    below = [f"* {escape_markdown(note)}" for note in remarks(table, "bold")]
    title = f"**{escape_markdown(table.title)}**"
    return "\n".join([title, "", body, *(["", *below] if below else [])])


def aligned(table: Table) -> dict[str, Any]:
    """How tabulate sets columns: names on the left, cells, which are texts, on the right."""
    align = ("left", *["right"] * len(table.columns))
    return {"disable_numparse": True, "colglobalalign": "right", "colalign": align}


def as_latex(table: Table) -> str:
    """A tabular of booktabs; what stands below the table is a comment, to be taken into a
    caption."""
    from tabulate import DataRow, Line, TableFormat, tabulate

    wide = len(table.columns) + 1

    def begin(widths: Sequence[int], aligns: Sequence[str]) -> str:
        return f"\\begin{{tabular}}{{l{'r' * (wide - 1)}}}\n\\toprule"

    line, end = DataRow("", " & ", " \\\\"), Line("\\bottomrule\n\\end{tabular}", "", "", "")
    booktabs = TableFormat(begin, Line("\\midrule", "", "", ""), None, end, line, line, 0, None)
    rows, rule = [], ""
    for heading, group in table.groups():
        if heading:
            rule += f"\\multicolumn{{{wide}}}{{l}}{{\\emph{{{escape_latex(heading)}}}}} \\\\\n"
        for row in group:
            cells = (
                as_cell(cell, "\\textbf{{{}}}".format, escape_latex, ("$\\pm$", "$^{=}$"), "--")
                for cell in row.cells
            )
            rows.append([rule + escape_latex(row.name), *cells])
            rule = ""
        rule = "\\midrule\n"
    heads = [escape_latex(head) for head in (table.first, *table.columns)]
    body = tabulate(rows, heads, booktabs, **aligned(table))
    below = [f"% {one_line(note)}" for note in remarks(table, "bold")]
    return "\n".join([f"% {one_line(table.title)}; needs \\usepackage{{booktabs}}", body, *below])


def escape_markdown(text: str) -> str:
    """A text in one line, with what Markdown would read escaped."""
    return "".join(f"\\{c}" if c in r"\`*_<>|[]" else c for c in one_line(text))


LATEX = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
LATEX |= {"±": r"$\pm$"} | {letter: f"\\{letter}" for letter in "&%$#_{}"}


def escape_latex(text: str) -> str:
    """A text in one line, with what LaTeX would read escaped."""
    return "".join(LATEX.get(c, c) for c in one_line(text))


def printed(table: Table, form: str = "text", terminal: bool = False) -> str:
    """A table in one of FORMATS; terminal: whether text may use bold letters."""
    if form == "text":
        return as_text(table, terminal)
    return {"markdown": as_markdown, "latex": as_latex}[form](table)
