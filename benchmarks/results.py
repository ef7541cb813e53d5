"""Print the tables of results/*.json as one Markdown page: python -m benchmarks.results.

  python -m benchmarks.results --write docs/results.md

A result is one file, so that every number has one home: the page is printed from the files, and a
test compares the two. docs/results.md is never edited by hand.
"""

import argparse
import html
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from amor import typed
from amor.study.table import Table, TableRow, as_markdown, escape_markdown

FOLDER = Path(__file__).parent.parent / "results"
Line = Annotated[str, Meta(min_length=1, pattern=r"\A[^\n]*\Z")]
INTRO = """\
# Results

Each table is printed from a file in `results/` by `benchmarks/results.py`, newest first. The
commit is the one that was measured or, where the measurement did not record it, the one that wrote
the numbers down.
"""


class ResultFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One measured table, with everything a reader needs to judge it or to measure it again."""

    title: Line
    date: Annotated[str, Meta(pattern=r"\A\d{4}-\d\d-\d\d\Z")]
    commit: Annotated[str, Meta(pattern=r"\A[0-9a-f]{7,40}\Z")]
    machine: Line  # processor, cores, threads, and what else ran on it
    command: Line  # as it was typed; DATA, RUN and MODEL stand for the reader's own
    data: Line  # text or task, sizes, seeds
    columns: Annotated[tuple[str, ...], Meta(min_length=2)]  # the first is that of the rows' names
    # a name and one cell per further column; null: not measured
    rows: Annotated[tuple[tuple[str | int | float | None, ...], ...], Meta(min_length=1)]
    notes: tuple[Line, ...] = ()
    details: Any = None  # raw numbers that the table summarises; not printed

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns) or not isinstance(row[0], str):
                raise ValueError(f"rows: {row}: expected a name and {len(self.columns) - 1} cells")

    def table(self) -> Table:
        """The table as the package prints it."""
        first, *columns = self.columns
        rows = [
            TableRow(str(name), tuple(None if cell is None else str(cell) for cell in cells))
            for name, *cells in self.rows
        ]
        return Table(self.title, first, tuple(columns), tuple(rows), notes=self.notes)

    def caption(self) -> str:
        """When, where and how it was measured, in Markdown."""
        where = escape_markdown(f"{self.date}, commit {self.commit}; {self.machine}; {self.data}")
        # <code>, not backticks: the test of examples runs commands in backticks, and these are long
        return f"{where}. Measured by <code>{html.escape(self.command, quote=False)}</code>."


def read(folder: Path = FOLDER) -> dict[str, ResultFile]:
    """File name -> result, newest first, then by name."""
    files = {path.name: typed.read(ResultFile, path) for path in sorted(folder.glob("*.json"))}
    return dict(sorted(files.items(), key=lambda item: item[1].date, reverse=True))


def page(results: dict[str, ResultFile]) -> str:
    """All results as a Markdown page."""
    parts = [INTRO]
    for name, result in results.items():
        _, _, body = as_markdown(result.table()).partition("\n")  # the title becomes a heading
        title = escape_markdown(result.title)
        source = f"File: `results/{name}`."
        parts.append(f"## {title}\n{body}\n\n{result.caption()} {source}\n")
    return "\n".join(parts)


def main(words: list[str] | None = None) -> None:
    """Print the page, or write it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.results", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--write", metavar="FILE", help="write the page here instead of printing")
    args = parser.parse_args(words)
    text = page(read())
    if args.write:
        Path(args.write).write_text(text)
    else:
        print(text, end="")


if __name__ == "__main__":
    main()
