"""Measure this project against other libraries and against its own goals: python -m benchmarks
SUITE.

The suites are those of this folder and those of `amor bench`. Some need the extra `peers`
(transformers).

  python -m benchmarks peers --only decode --json
  python -m benchmarks train --bars benchmarks/bars.toml
  python -m benchmarks savings --out savings.json

With --bars FILE the results are compared with the limits in a file; the exit code is 1 where one is
missed. docs/benchmarks.md describes such a file.
"""

import argparse
import sys
from typing import Any

import amor.bench
import benchmarks
from amor.cli import Parser, keep_freed_memory, run_command
from amor.cli.bench import add_suites, find_suites, run_suite, write_result
from benchmarks import bars


def rows_of_suites() -> dict[str, list[str]]:
    """Suite -> the rows it can measure."""
    return {name: list(suite.ROWS) for name, suite in all_suites().items()}


def all_suites() -> dict[str, Any]:
    """Name -> module, of `amor bench` and of this folder."""
    return find_suites(amor.bench) | find_suites(benchmarks)


def arguments(parser: Parser) -> None:
    """One subcommand per suite."""
    help_ = "limits to compare the results with; exit code 1 where one is missed"
    for each in add_suites(parser, all_suites()):
        each.add_argument("--bars", metavar="FILE", help=help_)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Run one suite and compare its results with the bars."""
    limits = bars.load(args.bars, rows_of_suites()) if args.bars else []
    result = run_suite(all_suites()[args.suite], args)
    compared = bars.compare(result, limits)
    if args.bars:
        bars.show(compared)
    result |= bars.as_json(compared)
    write_result(args, result)
    return result


def main(words: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    words = sys.argv[1:] if words is None else words
    keep_freed_memory()  # as `amor` does, so that numbers are comparable
    return run_command(sys.modules[__name__], "python -m benchmarks", words)


if __name__ == "__main__":
    raise SystemExit(main())
