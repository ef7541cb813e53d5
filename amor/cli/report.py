"""Write the report of a run again, set several runs side by side, or show an `amor bench decode`.

  amor report RUN
  amor report RUN --data FOLDER      when the data has moved since
  amor report RUN --quick            only redraw; do not open the model
  amor report RUN RUN RUN --figure curves.svg
  amor report decode.json --figure decode.svg      of amor bench decode --out decode.json

RUN/report.html needs no network and no other file. It is also written at the end of every
`amor train`. Several runs give a table, and with --figure their curves in one picture. A file of
the decode benchmark gives its table with the paper's figures beside ours, as Markdown, and with
--figure tokens/s against context.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from amor import typed
from amor.cli import Parser
from amor.errors import AmorError
from amor.run import Run


def arguments(parser: Parser) -> None:
    """The options of the verb."""
    parser.argument("runs", "RUN", "a run directory, or one file of amor bench decode --out", "+")
    parser.text("--data", "FOLDER", "where its prepared data is now")
    parser.flag("--quick", "draw what is in the run directory; do not open the model")
    parser.text("--figure", "FILE", "draw the curves into a .svg, .png or .pdf")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """One of the three kinds of report."""
    if args.runs[0].endswith(".json"):
        if len(args.runs) > 1 or args.data or args.quick:
            hint = "with --figure or without"
            raise AmorError(f"a file of amor bench decode is shown by itself, {hint}")
        return decode_report(Path(args.runs[0]), args.figure)
    runs = [Run(name) for name in args.runs]
    if len(runs) > 1 or args.figure:
        if args.data or args.quick:
            hint = "leave them out to set runs side by side"
            raise AmorError(f"--data and --quick are for the report of one run; {hint}")
        return side_by_side(runs, args.figure)
    return report(runs[0], args.data, args.quick)


def report(folder: Run, data: str | None, quick: bool) -> dict[str, Any]:
    """The page of one run."""
    from amor.cli._training import make_report
    from amor.study import report

    if not folder.used:
        hint = "amor train --out RUN writes one"
        raise AmorError(f"{folder.folder} is not a run directory (it has no config.json); {hint}")
    result = {"report": str(report.write(folder))} if quick else make_report(folder, data)
    print(f"{result['report']} written; open it in a browser")
    return result


def side_by_side(folders: list[Run], figure: str | None) -> dict[str, Any]:
    """A table of several runs, and their curves."""
    from amor.study import runs
    from amor.study.table import as_text

    rows = runs.compare(folders)
    written = draw("runs", rows, figure)
    print("\n".join([as_text(runs.table(rows), sys.stdout.isatty()), *written]))
    return {"runs": rows}


def decode_report(file: Path, figure: str | None) -> dict[str, Any]:
    """The tables of a decode benchmark, and its figure."""
    from amor.records.bench import DecodeFile
    from amor.study.decode import tables
    from amor.study.table import as_markdown

    measured = typed.read(DecodeFile, file)
    text = "\n\n".join(as_markdown(table) for table in tables(measured))
    if not text or (figure and not measured.curves):
        hint = "measure them with amor bench decode --parts contexts"
        raise AmorError(f"{file} has no tokens/s against context; {hint}")
    print("\n".join([text, *draw("decode", measured, figure)]))
    return {"table": text, "figure": figure}


def draw(name: str, data: Any, file: str | None) -> list[str]:
    """Draw a figure where a file is named; the line to print about it."""
    from amor.study import figures

    return [f"{figures.save(figures.draw(name, data), file)} written"] if file else []
