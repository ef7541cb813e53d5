"""Tell whether one evaluated model is better than another, document by document.

  amor compare evals/a evals/b
  amor compare evals/a evals/b --suite common-sense --samples 10000
  amor compare evals/a/common-sense.json evals/a/common-sense.closed.json      the same model, its gates closed

A and B are folders that amor eval wrote, or files in them. Documents are drawn again and again with replacement, the same ones
for both (a paired bootstrap): told are the difference of every task and of their average, the middle 95 % of what the draws
give, and in what share of them A is better. The same seed gives the same numbers.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from amor import typed
from amor.errors import AmorError


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("a", metavar="A", help="an evaluation folder, or a file in it")
    parser.add_argument("b", metavar="B", help="the other")
    parser.add_argument("--suite", metavar="NAME", help="by default every suite that both have")
    parser.add_argument("--decode", action="store_true", help="what was evaluated token by token: the files named .decode")
    parser.add_argument("--samples", type=int, default=10_000, metavar="N", help="resamples (default: 10000)")
    parser.add_argument("--seed", type=int, default=0, metavar="N")


def run(args: argparse.Namespace) -> dict[str, Any]:
    from amor.study.compare import compare, table
    from amor.study.table import as_text

    found = []
    for a, b in pairs(args):
        found.append(compare(a, b, args.samples, args.seed))
        print(as_text(table(found[-1]), sys.stdout.isatty()), end="\n\n")
    return {"comparisons": typed.tree(found)}


def pairs(args: argparse.Namespace) -> list[tuple[Any, Any]]:
    from amor.study import evals
    from amor.study.suites import LENGTHS

    first, second = Path(args.a), Path(args.b)
    named = [path.suffix == ".json" for path in (first, second)]
    if all(named):
        if args.suite or args.decode:
            raise AmorError("--suite and --decode choose files of folders; two files are named already")
        return [(evals.from_file(first), evals.from_file(second))]
    if any(named):
        raise AmorError(f"{first} and {second}: give two folders or two files")
    names = [args.suite] if args.suite else [n for n in evals.shared_suites([first, second], args.decode) if n != LENGTHS]
    if LENGTHS in names or not names:
        raise AmorError(f"{LENGTHS} tells no numbers per document to compare; amor table sets its curves side by side")
    return [tuple(evals.opened(folder, name, decode=args.decode) for folder in (first, second)) for name in names]  # type: ignore[misc]
