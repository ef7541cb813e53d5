"""Write the report of a run again, or set several runs side by side.

  amor report RUN
  amor report RUN --data FOLDER      when the data has moved since
  amor report RUN --quick            only redraw; do not open the model
  amor report RUN RUN RUN --figure curves.svg

RUN/report.html needs no network and no other file. It is also written at the end of every `amor train`.
Several runs give a table, and with --figure their curves in one picture.
"""

import argparse
from typing import Any

from amor.errors import AmorError
from amor.run import Run


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", metavar="RUN", nargs="+", help="a run directory, written by amor train or amor demo")
    parser.add_argument("--data", metavar="FOLDER", help="where its prepared data is now")
    parser.add_argument("--quick", action="store_true", help="draw what is in the run directory; do not open the model")
    parser.add_argument("--figure", metavar="FILE", help="draw the curves of all runs into a .svg, .png or .pdf")


def run(args: argparse.Namespace) -> dict[str, Any]:
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

    found = runs.compare(folders)
    print("\n".join(runs.lines(found)))
    if figure:
        from amor.study.figures import canvas
        from amor.study.figures.runs import draw

        print(f"{canvas.write(draw(found), figure)} written")
    return found
