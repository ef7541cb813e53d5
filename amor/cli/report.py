"""Write the report of a run again: curves, gates, histograms and texts in one HTML file.

  amor report RUN
  amor report RUN --data FOLDER      when the data has moved since
  amor report RUN --quick            only redraw; do not open the model

RUN/report.html needs no network and no other file. It is also written at the end of every `amor train`.
"""

import argparse
from typing import Any

from amor.errors import AmorError
from amor.run import Run


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="a run directory, written by amor train or amor demo")
    parser.add_argument("--data", metavar="FOLDER", help="where its prepared data is now")
    parser.add_argument("--quick", action="store_true", help="draw what is in the run directory; do not open the model")


def run(args: argparse.Namespace) -> dict[str, Any]:
    from amor.cli._seeing import make_report
    from amor.study import report

    folder = Run(args.run)
    if not folder.used:
        raise AmorError(f"{args.run} is not a run directory (it has no config.json); amor train --out RUN writes one")
    found = {"report": str(report.write(folder))} if args.quick else make_report(folder, args.data)
    print(f"{found['report']} written; open it in a browser")
    return found
