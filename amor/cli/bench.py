"""Measure speed and memory against the machine's ceilings and against other libraries: amor bench <suite>.

Suites: ops (each operator against its reference and the machine's ceiling), peers (whole layers and models beside
transformers, an extra: pip install "amor[peers]"), and whatever other module of amor/bench has `arguments` and `run`.
"""

import argparse
import importlib
import pkgutil
from typing import Any

from amor.errors import AmorError, nearest


def suites() -> list[str]:
    import amor.bench

    names = [m.name for m in pkgutil.iter_modules(amor.bench.__path__)]
    return [n for n in names if hasattr(importlib.import_module(f"amor.bench.{n}"), "arguments")]


def suite(name: str) -> Any:
    if name not in suites():
        raise AmorError(f"bench: no suite {name!r}; {nearest(name, suites())}")
    return importlib.import_module(f"amor.bench.{name}")


def arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="suite", metavar="suite", required=True)
    for name in suites():
        module = importlib.import_module(f"amor.bench.{name}")
        words = (module.__doc__ or "").split("\n")[0]
        each = kinds.add_parser(name, help=words, description=module.__doc__)
        module.arguments(each)
        # also after the suite's name; SUPPRESS, so that not giving it here does not undo one given before
        each.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="end with one line of JSON")


def run(args: argparse.Namespace) -> dict[str, Any]:
    if getattr(args, "rounds", 1) < 1:
        raise AmorError(f"--rounds {args.rounds}: at least one round is needed")
    return suite(args.suite).run(args)
