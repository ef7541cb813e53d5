"""The command line: `amor <verb>`. One file per verb; its docstring is its help.

A verb module defines `arguments(parser)` and `run(args)`. It prints for people as it goes and
returns its result, a record or a dict, which is printed as the last line with `--json`. A wrong
input is an AmorError: one line, exit code 2. Any other exception is a bug of ours: one line, exit
code 70. `--debug` adds the traceback to both. A result with `ok` False gives exit code 1, one with
`exit` that code.
"""

import argparse
import ast
import ctypes
import importlib
import io
import json
import os
import pkgutil
import re
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from amor import typed
from amor.errors import AmorError, nearest

# The table of contents: verbs in the order a user needs them. A verb not named here is listed last.
ORDER = (
    *("demo", "info", "doctor", "check", "prepare", "train", "convert", "attach", "fit"),
    *("study", "report", "generate", "trace", "eval", "recall", "table", "compare", "bench"),
)
MOST_INTEGER = 2**53  # of options: JSON keeps every integer up to it
BUG = 70  # the exit code of a mistake in the program: EX_SOFTWARE of sysexits.h
# of mallopt(3): how much free memory is kept, and from which size on memory is mapped anew
TRIM, MMAP = -1, -3
KEPT = 256 << 20  # bytes
LARGEST = 32 << 20  # the most that glibc takes


class Parser(argparse.ArgumentParser):
    """argparse with one-line errors that name the nearest right choice, and options in one line."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.register("type", int, integer)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse does, but `--option=--`, whose value argparse loses, is an error."""
        parsed, rest = super().parse_known_args(args, namespace)
        for action in self._actions:
            value = getattr(parsed, action.dest, None)
            values = value if isinstance(action, argparse._AppendAction) else [value]
            if action.nargs is None and any(isinstance(each, list) for each in values or ()):
                self.error(f"argument {'/'.join(action.option_strings)}: '--' is no value")
        return parsed, rest

    def error(self, message: str) -> NoReturn:
        """Print one line and leave with exit code 2."""
        unknown = re.match(r"unrecognized arguments: (--[\w-]+)", message)
        if unknown:
            message = f"no option {unknown[1]}; {nearest(unknown[1], self.flags())}"
        print(f"{self.prog}: {message} (see {self.prog} --help)", file=sys.stderr)
        raise SystemExit(2)

    def flags(self) -> set[str]:
        """Every option, those of subcommands too: argparse reports what these did not take here."""
        own = {name for a in self._actions for name in a.option_strings if name.startswith("--")}
        subcommands = [
            a.choices for a in self._actions if isinstance(a, argparse._SubParsersAction)
        ]
        return own.union(*(each.flags() for choices in subcommands for each in choices.values()))

    def flag(self, name: str, words: str) -> None:
        """An option without a value."""
        self.add_argument(name, action="store_true", help=words)

    def text(self, name: str, metavar: str, words: str, default: str | None = None) -> None:
        """An option whose value is a text."""
        words += "" if default is None else f" (default {default})"
        self.add_argument(name, metavar=metavar, default=default, help=words)

    def number(self, name: str, default: float | None, words: str, kind: type = int) -> None:
        """An option whose value is a number, of the default's type where there is one."""
        if default is not None:
            kind, words = type(default), f"{words} (default {default:,})"
        metavar = "N" if kind is int else "X"
        self.add_argument(name, type=kind, default=default, metavar=metavar, help=words)

    def choice(self, name: str, choices: Sequence[str], default: str | None, words: str) -> None:
        """An option whose value is one of several names."""
        self.add_argument(name, choices=choices, default=default, help=words)

    def argument(self, name: str, metavar: str, words: str, nargs: str | None = None) -> None:
        """An argument without a flag, or with nargs several or none."""
        self.add_argument(name, metavar=metavar, nargs=nargs, help=words)

    def required(self, name: str, metavar: str, words: str) -> None:
        """An option that must be given."""
        self.add_argument(name, metavar=metavar, required=True, help=words)

    def repeated(self, name: str, metavar: str, words: str, kind: type = str) -> None:
        """An option that may be given several times; its value is the list of values."""
        words += "; may be repeated"
        self.add_argument(name, metavar=metavar, action="append", default=[], type=kind, help=words)


def integer(text: str) -> int:
    """The value of an option that is an integer; one that no size or seed can be is refused."""
    value = int(text) if len(text) < 40 else MOST_INTEGER + 1
    if abs(value) > MOST_INTEGER:
        raise argparse.ArgumentTypeError(f"{shortened(text)} is too large, at most 2^53")
    return value


def verbs() -> dict[str, str]:
    """Verb -> the first line of its file, read without importing it."""
    folder = Path(__file__).parent
    names = [m.name for m in pkgutil.iter_modules([str(folder)]) if not m.name.startswith("_")]
    names.sort(key=lambda n: (ORDER.index(n) if n in ORDER else len(ORDER), n))
    texts = {n: ast.get_docstring(ast.parse((folder / f"{n}.py").read_text())) for n in names}
    return {n: (text or "").split("\n")[0] for n, text in texts.items()}


def contents() -> str:
    """The help of `amor` without a verb."""
    lines = "\n".join(f"  {name:<10} {words}" for name, words in verbs().items())
    return f"""amor: a language model that pays for attention only where it is unsure.

usage: amor <verb> [options]

{lines}

amor <verb> --help lists the options of a verb; every verb takes --json to end with one line of
JSON, and --debug to show where an error came from."""


def main(words: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    words = sys.argv[1:] if words is None else words
    if any("\0" in word for word in words):  # impossible in a shell, but not for a caller in Python
        print("amor: an argument holds a NUL character, which no name or text can", file=sys.stderr)
        return 2
    if not words or words[0] in ("-h", "--help", "help"):
        print(contents())
        return 0
    if words[0] in ("-V", "--version"):
        import amor

        print(f"amor {amor.__version__}")
        return 0
    if words[0] not in verbs():
        hint = nearest(words[0], verbs())
        print(f"amor: no verb {shortened(words[0])!r}; {hint}", file=sys.stderr)
        return 2
    keep_freed_memory()
    if isinstance(sys.stdout, io.TextIOWrapper):
        # a path need not be valid text, and a terminal need not have every character
        sys.stdout.reconfigure(errors="backslashreplace")
    module = importlib.import_module(f"amor.cli.{words[0]}")
    return run_command(module, f"amor {words[0]}", words[1:])


def keep_freed_memory() -> None:
    """Keep freed memory in this process for the next layer: memory that the system maps anew comes
    page by page, filled with zeros. A program that imports amor decides this for itself."""
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # not every C library has it
    if mallopt is not None:
        mallopt(TRIM, KEPT)
        mallopt(MMAP, LARGEST)


def parser_of(verb: str) -> Parser:
    """The parser of a verb's options."""
    return command_parser(importlib.import_module(f"amor.cli.{verb}"), f"amor {verb}")


def command_parser(module: ModuleType, prog: str) -> Parser:
    """The parser of a command: its module's docstring, its `arguments`, --json and --debug."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = Parser(prog=prog, description=module.__doc__, formatter_class=raw)
    module.arguments(parser)
    parser.flag("--json", "end with the result as one line of JSON")
    parser.flag("--debug", "show where an error came from")
    return parser


def shortened(name: object) -> str:
    """A name for an error message: on one line, and not thousands of characters."""
    text = "the system" if name is None else " ".join(str(name).split())
    return text if len(text) <= 120 else f"{text[:100]}... ({len(text):,} characters)"


def run_command(module: ModuleType, prog: str, words: list[str]) -> int:
    """Run a module that defines `arguments` and `run` as a command; the exit code."""
    args = command_parser(module, prog).parse_args(words)
    try:
        result: dict[str, Any] = typed.tree(module.run(args) or {})
    except AmorError as error:
        return failed(args, f"{prog}: {' '.join(str(error).split())}", 2)
    except BrokenPipeError:  # the reader of our output has left, e.g. `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:  # a name too long, a folder where a file should be, a full disk
        message = f"{prog}: {shortened(error.filename)}: {error.strerror or error}"
        return failed(args, message, 2)
    except UnicodeEncodeError as error:
        message = f"{shortened(ascii(error.object))} is no name: it holds half of a character"
        return failed(args, f"{prog}: {message}", 2)
    except KeyboardInterrupt:
        print(f"\n{prog}: stopped", file=sys.stderr)
        return 130
    except Exception as error:
        more = "" if args.debug else " (run again with --debug for where)"
        message = f"{type(error).__name__}: {' '.join(str(error).split())}{more}"
        return failed(args, f"{prog}: a bug: {message}", BUG)
    if args.json:
        print(json.dumps(result))
    return result.get("exit", 0 if result.get("ok", True) else 1)


def failed(args: argparse.Namespace, message: str, code: int) -> int:
    """Print an error in one line, after its traceback with --debug; returns the exit code."""
    if args.debug:
        traceback.print_exc()
    print(message, file=sys.stderr)
    return code
