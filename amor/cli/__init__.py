"""The command line: `amor <verb>`. One file a verb; its docstring is its help.

A verb module defines `arguments(parser)` and `run(args) -> dict`. It prints for people as it goes; the dict is what it
found, printed as the last line when `--json` is given. A wrong input is an AmorError: one line, exit code 2. Anything else that
is raised is a bug of ours: one line that says so, exit code 70. With `--debug` both are shown with where they came from.
A verb that finds a failure puts `"ok": False` into its dict and the command leaves with exit code 1, or with `"exit"`.
"""

import argparse
import ast
import importlib
import io
import json
import os
import pkgutil
import re
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from amor.cli._process import keep_freed_memory
from amor.errors import AmorError, nearest

# The table of contents: verbs in the order a user meets them. A verb not named here is listed last.
ORDER = [
    "demo",
    "info",
    "doctor",
    "check",
    "prepare",
    "train",
    "convert",
    "attach",
    "fit",
    "study",
    "report",
    "generate",
    "trace",
    "eval",
    "recall",
    "table",
    "compare",
    "bench",
]


BUG = 70  # the exit code of a mistake in the program: EX_SOFTWARE of sysexits.h


class Parser(argparse.ArgumentParser):
    """argparse, with one-line errors that name the nearest right choice."""

    def error(self, message: str) -> NoReturn:
        unknown = re.match(r"unrecognized arguments: (--[\w-]+)", message)
        if unknown:
            message = f"no option {unknown[1]}; {nearest(unknown[1], self.flags())}"
        print(f"{self.prog}: {message} (see {self.prog} --help)", file=sys.stderr)
        raise SystemExit(2)

    def flags(self) -> set[str]:
        """Every option, those of the parsers below this one too: argparse hands up what they did not know."""
        found = {flag for action in self._actions for flag in action.option_strings if flag.startswith("--")}
        below = [action.choices for action in self._actions if isinstance(action, argparse._SubParsersAction)]
        return found.union(*(parser.flags() for choices in below for parser in choices.values()))


def verbs() -> dict[str, str]:
    """Verb -> the first sentence of its file, read without importing it."""
    folder = Path(__file__).parent
    names = [m.name for m in pkgutil.iter_modules([str(folder)]) if not m.name.startswith("_")]
    names.sort(key=lambda n: (ORDER.index(n) if n in ORDER else len(ORDER), n))
    return {n: (ast.get_docstring(ast.parse((folder / f"{n}.py").read_text())) or "").split("\n")[0] for n in names}


def contents() -> str:
    lines = [f"  {name:<10} {words}" for name, words in verbs().items()]
    head = ["amor: a language model that pays for attention only where it is unsure.", "", "usage: amor <verb> [options]", ""]
    foot = [
        "",
        "amor <verb> --help tells what a verb takes; every verb takes --json to end with one line of JSON,",
        "and --debug to show where an error came from.",
    ]
    return "\n".join([*head, *lines, *foot])


def main(words: list[str] | None = None) -> int:
    words = sys.argv[1:] if words is None else words
    if any("\0" in word for word in words):  # no shell hands one over, but a caller in Python may
        print("amor: an argument holds a NUL character, which no name or text on a command line can", file=sys.stderr)
        return 2
    if not words or words[0] in ("-h", "--help", "help"):
        print(contents())
        return 0
    if words[0] in ("-V", "--version"):
        import amor

        print(f"amor {amor.__version__}")
        return 0
    if words[0] not in verbs():
        print(f"amor: no verb {shortened(words[0])!r}; {nearest(words[0], verbs())}", file=sys.stderr)
        return 2
    keep_freed_memory()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a path need not be text, and a terminal need not know every letter
    return run_verb(words[0], words[1:])


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


def parser_of(verb: str) -> Parser:
    """The parser of a verb's options."""
    return command_parser(importlib.import_module(f"amor.cli.{verb}"), f"amor {verb}")


def command_parser(module: ModuleType, prog: str) -> Parser:
    """The parser of a command: its module's docstring, its `arguments`, --json and --debug."""
    parser = Parser(prog=prog, description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    module.arguments(parser)
    parser.add_argument("--json", action="store_true", help="end with one line of JSON holding what was found")
    parser.add_argument("--debug", action="store_true", help="of an error also show where it came from")
    return parser


def shortened(name: object) -> str:
    """A name as an error shows it: one line of it, and not thousands of characters."""
    text = "the system" if name is None else " ".join(str(name).split())
    return text if len(text) <= 120 else f"{text[:100]}... ({len(text):,} characters)"


def run_verb(verb: str, words: list[str]) -> int:
    """Run a verb with the words of a command line; the exit code."""
    return run_command(importlib.import_module(f"amor.cli.{verb}"), f"amor {verb}", words)


def run_command(module: ModuleType, prog: str, words: list[str]) -> int:
    """Run a module that defines `arguments` and `run` as a command, with one-line errors; the exit code."""
    args = command_parser(module, prog).parse_args(words)
    try:
        found: dict[str, Any] = module.run(args) or {}
    except AmorError as error:
        if args.debug:
            traceback.print_exc()
        print(f"{prog}: {one_line(error)}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader of our output has left, e.g. `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:  # a name too long, a folder where a file should be, no permission, a full disk
        print(f"{prog}: {shortened(error.filename)}: {error.strerror or error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"\n{prog}: stopped", file=sys.stderr)
        return 130
    except Exception as error:  # nothing is hidden: it is named a bug, and --debug shows where
        if args.debug:
            traceback.print_exc()
        more = "" if args.debug else " (run again with --debug for where)"
        print(f"{prog}: a bug: {type(error).__name__}: {one_line(error)}{more}", file=sys.stderr)
        return BUG
    if args.json:
        print(json.dumps(found))
    return found.get("exit", 0 if found.get("ok", True) else 1)
