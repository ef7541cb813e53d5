"""Set evaluations side by side in the columns of the paper's tables, with errors and a floor.

  amor table evals/a evals/b
  amor table evals/a evals/b --suite common-sense --floor evals/untrained
  amor table evals/a evals/b --suite retrieval --format latex
  amor table evals/a --suite common-sense --gates --figure accuracy.svg
  amor table evals/a evals/b --suite niah --figure niah.png
  amor table evals/a evals/b --suite length-extrapolation --bucket --figure curves.svg --figure firing:firing.svg

Rows are folders that amor eval wrote, then the paper's. A number is bold only where its model is
ahead of every other row of ours by more than two standard errors of the difference, document by
document; `=` marks what an untrained model of the same shape (--floor) does as well. Evaluations of
different data, limits or versions of the harness are refused.
"""  # noqa: E501

import argparse
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from amor.cli import Parser
from amor.errors import AmorError, nearest
from amor.eval.tasks import suite
from amor.study import eval_tables, evals, figures
from amor.study.figures import suite_figures
from amor.study.figures.canvas import FORMATS as ENDINGS
from amor.study.table import FORMATS, printed

SCALES = ("180M", "440M", "1.5B")


def arguments(parser: Parser) -> None:
    """The options of the verb."""
    parser.argument("folders", "OUT", "a folder of amor eval", "+")
    parser.text("--suite", "NAME", "by default every suite that all have")
    parser.text("--floor", "OUT", "the evaluation of an untrained model of the same shape")
    parser.choice("--scale", SCALES, None, "of the paper's rows (default: 180M or 1.5B, by suite)")
    parser.flag("--ablations", "the rows of the paper's ablations too")
    parser.flag("--gates", "rows with gates closed and open too, and firing rates")
    parser.flag("--decode", "what was evaluated token by token: the files named .decode")
    parser.flag("--bucket", "of length-extrapolation: of the last 1,024 tokens, not of prefixes")
    parser.add_argument("--format", choices=FORMATS, default="text")
    kinds = f"KIND is one of {', '.join(suite_figures())} (default: the suite's own)"
    parser.repeated("--figure", "[KIND:]FILE", f"draw into a .svg, .png or .pdf; {kinds}")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Print the tables and draw the figures."""
    folders = [Path(folder) for folder in args.folders]
    floor = Path(args.floor) if args.floor else None
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise AmorError("the same folder twice; give each once")
    every = [*folders, *([floor] if floor else [])]
    names = [args.suite] if args.suite else evals.shared_suites(every, args.decode)
    options = args.scale, args.ablations, args.gates, args.decode, args.bucket
    request = eval_tables.TableRequest(tuple(folders), floor, *options)
    wanted = [figure_of(words, names) for words in args.figure]
    tables = [table for name in names for table in eval_tables.tables(name, request)]
    for table in tables:
        print(printed(table, args.format, sys.stdout.isatty()), end="\n\n")
    for kind, file in wanted:
        with_gates = replace(request, gates=args.gates or kind == "accuracy")
        rows = eval_tables.read(names[0], with_gates)
        print(f"{figures.save(figures.draw(kind, rows), file)} written")
    return {"tables": tables, "figures": [str(file) for _, file in wanted]}


def figure_of(words: str, names: list[str]) -> tuple[str, Path]:
    """The kind and the file of one --figure."""
    where, figures = f"--figure {words}", suite_figures()
    if len(names) > 1:
        raise AmorError(f"{where}: of one suite; choose it with --suite out of {', '.join(names)}")
    kind, file = re.fullmatch(r"(?:(\w+):)?(.*)", words, re.S).groups()  # type: ignore[union-attr]
    if kind is not None and kind not in figures:
        raise AmorError(f"{where}: no figure {kind!r}; {nearest(kind, figures)}")
    if Path(file).suffix not in ENDINGS:
        raise AmorError(f"{where}: a figure is one of {', '.join(ENDINGS)}")
    kind = kind or suite(names[0]).figure
    if not kind:
        raise AmorError(f"{where}: no figure is drawn of {names[0]}")
    if names[0] not in figures[kind]:
        raise AmorError(f"{where}: {kind} is drawn of {' or '.join(figures[kind])}, not {names[0]}")
    return kind, Path(file)
