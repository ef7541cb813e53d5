"""A table of evaluations as text, Markdown or LaTeX. What is bold and what `=` means is said under it."""

import re
from collections.abc import Callable, Iterator
from itertools import groupby

from amor.study.tables import Cell, Line, Table

BEST = "ahead of every other row of ours by more than two paired standard errors"
FLOOR = "within two paired standard errors of the floor"


def number(value: float, digits: int) -> str:
    return f"{value:.1e}" if abs(value) >= 1e5 else f"{value:,.{digits}f}"


def plain(text: str) -> str:
    """A name from a file as one line without anything that would steer a terminal."""
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())


def text(table: Table, terminal: bool = False) -> str:
    """For people; bold letters on a terminal, *stars* elsewhere."""
    bold = "\033[1m{}\033[0m".format if terminal else "*{}*".format
    rows = [[plain(table.first), *map(plain, table.columns)]]
    rows += [[plain(line.name), *(text_cell(cell, bold) for cell in line.cells)] for line in table.lines]
    widths = [max(map(_width, column)) for column in zip(*rows)]
    shown = ["  ".join(_padded(cell, width, n == 0) for n, (cell, width) in enumerate(zip(row, widths))).rstrip() for row in rows]
    rule = "-" * (sum(widths) + 2 * (len(widths) - 1))
    lines, place = [plain(table.title), shown[0]], 1
    for kind, group in groupby(table.lines, key=lambda line: line.kind):
        count = len(list(group))
        lines += [f"{table.paper} ".ljust(len(rule), "-") if kind == "paper" else rule, *shown[place : place + count]]
        place += count
    return "\n".join([*lines, "", *map(plain, legend(table, "bold" if terminal else "*")), *map(plain, table.notes)])


def text_cell(cell: Cell | None, bold: Callable[[str], str]) -> str:
    if cell is None:
        return "-"
    value = number(cell.value, cell.digits)
    error = "" if cell.error is None else f"±{number(cell.error, cell.digits)}"
    return f"{bold(value) if cell.best else value}{error}{'=' if cell.floor else ''}"


def _width(cell: str) -> int:
    return len(re.sub(r"\033\[\d+m", "", cell))


def _padded(cell: str, width: int, left: bool) -> str:
    room = " " * (width - _width(cell))
    return cell + room if left else room + cell


def legend(table: Table, bold: str) -> Iterator[str]:
    """What the marks that stand in this table mean."""
    cells = [cell for line in table.lines for cell in line.cells if cell]
    if any(cell.error is not None for cell in cells):
        yield "±: one standard error"
    if any(cell.best for cell in cells):
        yield f"{bold}: {BEST}"
    if any(cell.floor for cell in cells):
        yield f"=: {FLOOR}"


def markdown(table: Table) -> str:
    head = f"| {' | '.join(_md(name) for name in (table.first, *table.columns))} |"
    lines = [f"**{_md(table.title)}**", "", head, "|---|" + "---:|" * len(table.columns)]
    for kind, group in groupby(table.lines, key=lambda line: line.kind):
        if kind == "paper":
            lines.append(f"| *{_md(table.paper)}* |" + " |" * len(table.columns))
        for line in group:
            cells = [text_cell(cell, "**{}**".format) for cell in line.cells]
            lines.append(f"| {' | '.join([_md(line.name), *cells])} |")
    remarks = [*legend(table, "bold"), *table.notes]
    return "\n".join([*lines, "", *(f"* {_md(note)}" for note in remarks)])


def _md(text: str) -> str:
    return re.sub(r"([\\`*_<>|\[\]])", r"\\\1", plain(text))


LATEX = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$"}
LATEX |= {letter: f"\\{letter}" for letter in "&%$#_{}"}


def latex(table: Table) -> str:
    """A tabular of booktabs; what stands under it is a comment, to be taken into a caption."""
    wide = len(table.columns) + 1
    lines = [f"% {plain(table.title)}; needs \\usepackage{{booktabs}}", f"\\begin{{tabular}}{{l{'r' * (wide - 1)}}}", "\\toprule"]
    lines.append(_tex_row([_tex(name) for name in (table.first, *table.columns)]))
    for kind, group in groupby(table.lines, key=lambda line: line.kind):
        lines.append("\\midrule")
        if kind == "paper":
            lines.append(f"\\multicolumn{{{wide}}}{{l}}{{\\emph{{{_tex(table.paper)}}}}} \\\\")
        lines += [_tex_line(line) for line in group]
    remarks = [*legend(table, "bold"), *table.notes]
    return "\n".join([*lines, "\\bottomrule", "\\end{tabular}", *(f"% {plain(note)}" for note in remarks)])


def _tex_line(line: Line) -> str:
    return _tex_row([_tex(line.name), *map(_tex_cell, line.cells)])


def _tex_row(cells: list[str]) -> str:
    return " & ".join(cells) + " \\\\"


def _tex_cell(cell: Cell | None) -> str:
    if cell is None:
        return "--"
    value = number(cell.value, cell.digits)
    held = f"\\textbf{{{value}}}" if cell.best else value
    error = "" if cell.error is None else f"$\\pm${number(cell.error, cell.digits)}"
    return held + error + ("$^{=}$" if cell.floor else "")


def _tex(text: str) -> str:
    return "".join(LATEX.get(letter, letter) for letter in plain(text))


FORMATS: dict[str, Callable[[Table], str]] = {"text": text, "markdown": markdown, "latex": latex}
