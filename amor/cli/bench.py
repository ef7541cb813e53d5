"""Measure the speed of this machine: its ceilings, operators, training, decode, batches.

The suites are listed below; `amor bench SUITE --help` describes one.

  amor bench ops --only linear --json
  amor bench decode --out decode.json     write the results as JSON
"""

import argparse
import importlib
import json
import pkgutil
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from amor.cli import Parser
from amor.errors import AmorError
from amor.files import disk_errors, file_to_write


def find_suites(package: ModuleType) -> dict[str, Any]:
    """Name -> module, for the modules of a package that are suites: they define `arguments`, `run`
    and `ROWS`."""
    names = [m.name for m in pkgutil.iter_modules(package.__path__) if not m.name.startswith("_")]
    modules = {name: importlib.import_module(f"{package.__name__}.{name}") for name in names}
    return {name: module for name, module in modules.items() if hasattr(module, "arguments")}


def suites() -> dict[str, Any]:
    """The suites of `amor bench`."""
    import amor.bench

    return find_suites(amor.bench)


def add_suites(parser: Parser, suites: Mapping[str, Any]) -> list[Parser]:
    """Add a subcommand per suite; their parsers."""
    kinds = parser.add_subparsers(dest="suite", metavar="suite", required=True)
    parsers = []
    for name, module in suites.items():
        text = module.__doc__ or ""
        raw, first = argparse.RawDescriptionHelpFormatter, text.split("\n")[0]
        each = kinds.add_parser(name, help=first, description=text, formatter_class=raw)
        module.arguments(each)
        each.text("--out", "FILE", "write the results as JSON")
        # also after the suite's name; SUPPRESS: its absence here must not undo one given before
        hidden: dict[str, Any] = {"action": "store_true", "default": argparse.SUPPRESS}
        each.add_argument("--json", **hidden, help="end with one line of JSON")
        each.add_argument("--debug", **hidden, help="show where an error came from")
        parsers.append(each)
    return parsers


def arguments(parser: Parser) -> None:
    """One subcommand per suite."""
    add_suites(parser, suites())


def run_suite(suite: Any, args: argparse.Namespace) -> dict[str, Any]:
    """Check the options that all suites share, then run one."""
    if getattr(args, "rounds", 1) < 1:
        raise AmorError(f"--rounds {args.rounds}: at least one round is needed")
    if args.out:
        file_to_write(args.out)
    return suite.run(args)


def write_result(args: argparse.Namespace, result: dict[str, Any]) -> None:
    """Write the JSON file of --out."""
    if args.out:
        out = file_to_write(args.out)
        with disk_errors(out):
            out.write_text(json.dumps(result, indent=1) + "\n")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Run one suite."""
    result = run_suite(suites()[args.suite], args)
    write_result(args, result)
    return result
