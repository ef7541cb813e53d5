"""Test whether one evaluated model is better than another, document by document.

  amor compare evals/a evals/b
  amor compare evals/a evals/b --suite common-sense --samples 10000
  amor compare evals/a/common-sense.json evals/a/common-sense.closed.json    one model, gates closed

A and B are folders that amor eval wrote, or files in them. Documents are drawn again and again with
replacement, the same ones for both (a paired bootstrap). Printed are the difference of every task
and of their average, the middle 95 % of what the draws give, and in what share of them A is better.
The same seed gives the same numbers.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from amor.cli import Parser
from amor.errors import AmorError
from amor.eval.tasks import LENGTHS
from amor.study import evals
from amor.study.compare import compare, table
from amor.study.table import as_text


def arguments(parser: Parser) -> None:
    """The options of the verb."""
    parser.argument("a", "A", "an evaluation folder, or a file in it")
    parser.argument("b", "B", "the other")
    parser.text("--suite", "NAME", "by default every suite that both have")
    parser.flag("--decode", "what was evaluated token by token: the files named .decode")
    parser.number("--samples", 10_000, "resamples")
    parser.number("--seed", 0, "of the resamples")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Compare suite by suite."""
    comparisons = []
    for a, b in pairs(args):
        comparisons.append(compare(a, b, args.samples, args.seed))
        print(as_text(table(comparisons[-1]), sys.stdout.isatty()), end="\n\n")
    return {"comparisons": comparisons}


def pairs(args: argparse.Namespace) -> list[tuple[Any, Any]]:
    """The evaluations to compare: two files, or those of every suite that both folders have."""
    paths = Path(args.a), Path(args.b)
    files = [path.suffix == ".json" for path in paths]
    if all(files):
        if args.suite or args.decode:
            hint = "two files are named already"
            raise AmorError(f"--suite and --decode choose files of folders; {hint}")
        return [(evals.from_file(paths[0]), evals.from_file(paths[1]))]
    if any(files):
        raise AmorError(f"{paths[0]} and {paths[1]}: give two folders or two files")
    shared = [args.suite] if args.suite else evals.shared_suites(list(paths), args.decode)
    names = [name for name in shared if args.suite or name != LENGTHS]
    if LENGTHS in names or not names:
        hint = "amor table sets its curves side by side"
        raise AmorError(f"{LENGTHS} has no numbers per document to compare; {hint}")
    both = [[evals.opened(path, name, decode=args.decode) for path in paths] for name in names]
    return [(a, b) for a, b in both]
