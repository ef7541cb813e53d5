"""Write the report of a run again, set several runs side by side, or show what `amor bench decode` found.

  amor report RUN
  amor report RUN --data FOLDER      when the data has moved since
  amor report RUN --quick            only redraw; do not open the model
  amor report RUN RUN RUN --figure curves.svg
  amor report decode.json --figure decode.svg      of amor bench decode --out decode.json

RUN/report.html needs no network and no other file. It is also written at the end of every `amor train`.
Several runs give a table, and with --figure their curves in one picture. A file of the decode benchmark gives its table with the
paper's figures beside ours, as Markdown, and with --figure tokens/s against context.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from amor import typed
from amor.errors import AmorError
from amor.run import Run


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs",
        metavar="RUN",
        nargs="+",
        help="a run directory, written by amor train or amor demo; or one file of amor bench decode --out",
    )
    parser.add_argument("--data", metavar="FOLDER", help="where its prepared data is now")
    parser.add_argument("--quick", action="store_true", help="draw what is in the run directory; do not open the model")
    parser.add_argument("--figure", metavar="FILE", help="draw the curves into a .svg, .png or .pdf")


def run(args: argparse.Namespace) -> dict[str, Any]:
    if args.runs[0].endswith(".json"):
        if len(args.runs) > 1 or args.data or args.quick:
            raise AmorError("a file of amor bench decode is shown by itself, with --figure or without")
        return decoded(Path(args.runs[0]), args.figure)
    folders = [Run(name) for name in args.runs]
    if len(folders) > 1 or args.figure:
        if args.data or args.quick:
            raise AmorError("--data and --quick are for the report of one run; leave them out to set runs side by side")
        return side_by_side(folders, args.figure)
    return report(folders[0], args.data, args.quick)


def report(folder: Run, data: str | None, quick: bool) -> dict[str, Any]:
    from amor.cli._seeing import make_report
    from amor.study import report

    if not folder.used:
        raise AmorError(f"{folder.folder} is not a run directory (it has no config.json); amor train --out RUN writes one")
    found = {"report": str(report.write(folder))} if quick else make_report(folder, data)
    print(f"{found['report']} written; open it in a browser")
    return found


def side_by_side(folders: list[Run], figure: str | None) -> dict[str, Any]:
    from amor.study import runs
    from amor.study.table import as_text

    rows = runs.compare(folders)
    written = picture("runs", rows, figure)
    print("\n".join([as_text(runs.table(rows), sys.stdout.isatty()), *written]))
    return {"runs": typed.tree(rows)}


def decoded(file: Path, figure: str | None) -> dict[str, Any]:
    """The table of a decode benchmark, and its figure."""
    from amor.records.bench import DecodeFile
    from amor.study.decode import tables
    from amor.study.table import as_markdown

    found = typed.read(DecodeFile, file)
    text = "\n\n".join(as_markdown(table) for table in tables(found))
    if not text or (figure and not found.curves):
        raise AmorError(f"{file} has no tokens/s against context; measure them with amor bench decode --parts contexts")
    written = picture("decode", found, figure)
    print("\n".join([text, *written]))
    return {"table": text, "figure": figure}


def picture(name: str, found: Any, file: str | None) -> list[str]:
    """Draw it, where a file is named, and say so."""
    from amor.study import figures

    return [f"{figures.save(figures.draw(name, found), file)} written"] if file else []
