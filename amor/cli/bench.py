"""Measure speed and memory against the machine's ceilings and against other libraries: amor bench <suite>.

The suites are listed below; `amor bench SUITE --help` tells what one takes. peers, and some rows of train, set our models beside
transformers, an extra: pip install "amor[peers]".

  amor bench peers --only decode --json
  amor bench train --bars bars.toml       judge what was found by limits of yours; exit code 1 where one is missed
  amor bench decode --out decode.json     write what was found

Without --bars FILE nothing is judged. docs/benchmarks.md says what a file of bars holds.
"""

import argparse
import importlib
import json
import pkgutil
from typing import Any

from amor.errors import AmorError, nearest
from amor.files import disk_errors, file_to_write


def suites() -> list[str]:
    import amor.bench

    names = [m.name for m in pkgutil.iter_modules(amor.bench.__path__)]
    return [n for n in names if hasattr(importlib.import_module(f"amor.bench.{n}"), "arguments")]


def suite(name: str) -> Any:
    if name not in suites():
        raise AmorError(f"bench: no suite {name!r}; {nearest(name, suites())}")
    return importlib.import_module(f"amor.bench.{name}")


def rows_of_suites() -> dict[str, list[str]]:
    """For each suite the rows it can be asked for."""
    return {name: list(suite(name).ROWS) for name in suites()}


def arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="suite", metavar="suite", required=True)
    for name in suites():
        module = importlib.import_module(f"amor.bench.{name}")
        words = (module.__doc__ or "").split("\n")[0]
        each = kinds.add_parser(
            name, help=words, description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        module.arguments(each)
        each.add_argument("--bars", metavar="FILE", help="limits to judge what was found by; exit code 1 where one is missed")
        each.add_argument("--out", metavar="FILE", help="write what was found as JSON")
        # also after the suite's name; SUPPRESS, so that not giving it here does not undo one given before
        each.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="end with one line of JSON")
        each.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help="show where an error came from")


def run(args: argparse.Namespace) -> dict[str, Any]:
    from amor.bench import bars

    if getattr(args, "rounds", 1) < 1:
        raise AmorError(f"--rounds {args.rounds}: at least one round is needed")
    out = file_to_write(args.out) if args.out else None
    limits = bars.load(args.bars, rows_of_suites()) if args.bars else []
    found = suite(args.suite).run(args)
    judged = bars.judge(found, limits)
    if args.bars:
        bars.show(judged)
    found |= bars.as_json(judged)
    if out:
        with disk_errors(out):
            out.write_text(json.dumps(found, indent=1) + "\n")
    return found
