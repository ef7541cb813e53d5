"""Set evaluations side by side in the columns of the paper's tables, with errors, a floor and the paper's rows.

  amor table evals/a evals/b
  amor table evals/a evals/b --suite common-sense --floor evals/untrained
  amor table evals/a evals/b --suite retrieval --format latex
  amor table evals/a --suite common-sense --gates --figure accuracy.svg
  amor table evals/a evals/b --suite niah --figure niah.png
  amor table evals/a evals/b --suite length-extrapolation --bucket --figure curves.svg --figure firing:firing.svg

Rows are folders that amor eval wrote. A number is bold only where its model is ahead of every other row of ours by more than two
standard errors of the difference, document by document; `=` marks what an untrained model of the same shape (--floor) does
as well. Evaluations of different data, limits or versions of the harness are refused.
"""

import argparse
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from amor import typed
from amor.errors import AmorError, nearest
from amor.study.figures import suite_figures
from amor.study.table import FORMATS

SCALES = ("180M", "440M", "1.5B")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folders", metavar="OUT", nargs="+", help="an evaluation folder, written by amor eval")
    parser.add_argument("--suite", metavar="NAME", help="by default every suite that all have")
    parser.add_argument("--floor", metavar="OUT", help="the evaluation of an untrained model of the same shape")
    parser.add_argument("--scale", choices=SCALES, help="of the paper's rows (default: 180M of common-sense, else 1.5B)")
    parser.add_argument("--ablations", action="store_true", help="the rows of the paper's ablations too")
    parser.add_argument("--gates", action="store_true", help="rows with gates closed and open too, and firing rates")
    parser.add_argument("--decode", action="store_true", help="what was evaluated token by token: the files named .decode")
    parser.add_argument(
        "--bucket", action="store_true", help="of length-extrapolation: of the last 1,024 tokens, not of prefixes"
    )
    parser.add_argument("--format", choices=FORMATS, default="text")
    parser.add_argument(
        "--figure",
        action="append",
        default=[],
        metavar="[KIND:]FILE",
        help=f"draw into a .svg, .png or .pdf; KIND is one of {', '.join(suite_figures())} (default: the suite's own)",
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    from amor.study import eval_tables, evals
    from amor.study.table import printed

    folders, floor = [Path(folder) for folder in args.folders], Path(args.floor) if args.floor else None
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise AmorError("the same folder twice; give each once")
    names = [args.suite] if args.suite else evals.shared_suites([*folders, *([floor] if floor else [])], args.decode)
    request = eval_tables.TableRequest(tuple(folders), floor, args.scale, args.ablations, args.gates, args.decode, args.bucket)
    wanted = [figure(given, names) for given in args.figure]
    found = [table for name in names for table in eval_tables.tables(name, request)]
    for table in found:
        print(printed(table, args.format, sys.stdout.isatty()), end="\n\n")
    for kind, file in wanted:
        print(f"{drawn(kind, file, names[0], request)} written")
    return {"tables": typed.tree(found), "figures": [str(file) for _, file in wanted]}


def figure(given: str, names: list[str]) -> tuple[str, Path]:
    """Which figure goes into which file; known before the work."""
    from amor.study.figures.canvas import FORMATS as ENDINGS
    from amor.study.suites import suite

    known = suite_figures()
    if len(names) > 1:
        raise AmorError(f"--figure {given}: of one suite; choose it with --suite out of {', '.join(names)}")
    kind, file = re.fullmatch(r"(?:(\w+):)?(.*)", given, re.S).groups()  # type: ignore[union-attr]
    if kind is not None and kind not in known:
        raise AmorError(f"--figure {given}: no figure {kind!r}; {nearest(kind, known)}")
    if Path(file).suffix not in ENDINGS:
        raise AmorError(f"--figure {given}: a figure is one of {', '.join(ENDINGS)}")
    kind = kind or suite(names[0]).figure
    if not kind:
        raise AmorError(f"--figure {given}: no figure is drawn of {names[0]}")
    if names[0] not in known[kind]:
        raise AmorError(f"--figure {given}: {kind} is drawn of {' or '.join(known[kind])}, not of {names[0]}")
    return kind, Path(file)


def drawn(kind: str, file: Path, name: str, request: Any) -> Path:
    from amor.study import eval_tables, figures

    suite_rows = eval_tables.read(name, replace(request, gates=request.gates or kind == "accuracy"))
    return figures.save(figures.draw(kind, suite_rows), file)
