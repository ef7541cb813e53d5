"""The command line: `amor <verb>`. One file a verb; its docstring is its help.

A verb module defines `arguments(parser)` and `run(args) -> dict`. It prints for people as it goes; the dict is what it
found, printed as the last line when `--json` is given. A wrong input is an AmorError: one line, exit code 2.
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
from pathlib import Path
from typing import Any, NoReturn

from amor.cli._process import keep_freed_memory
from amor.errors import AmorError, nearest

# The table of contents: verbs in the order a user meets them. A verb not named here is listed last.
ORDER = ["demo", "info", "doctor", "check", "prepare", "train", "report", "generate", "trace", "bench"]


class Parser(argparse.ArgumentParser):
    """argparse, with one-line errors that name the nearest right choice."""

    def error(self, message: str) -> NoReturn:
        unknown = re.match(r"unrecognized arguments: (--[\w-]+)", message)
        if unknown:
            flags = [f for action in self._actions for f in action.option_strings if f.startswith("--")]
            message = f"no option {unknown[1]}; {nearest(unknown[1], flags)}"
        print(f"{self.prog}: {message} (see {self.prog} --help)", file=sys.stderr)
        raise SystemExit(2)


def verbs() -> dict[str, str]:
    """Verb -> the first sentence of its file, read without importing it."""
    folder = Path(__file__).parent
    names = [m.name for m in pkgutil.iter_modules([str(folder)]) if not m.name.startswith("_")]
    names.sort(key=lambda n: (ORDER.index(n) if n in ORDER else len(ORDER), n))
    return {n: (ast.get_docstring(ast.parse((folder / f"{n}.py").read_text())) or "").split("\n")[0] for n in names}


def contents() -> str:
    lines = [f"  {name:<10} {words}" for name, words in verbs().items()]
    head = ["amor: a language model that pays for attention only where it is unsure.", "", "usage: amor <verb> [options]", ""]
    foot = ["", "amor <verb> --help tells what a verb takes; every verb takes --json to end with one line of JSON."]
    return "\n".join([*head, *lines, *foot])


def main(words: list[str] | None = None) -> int:
    words = sys.argv[1:] if words is None else words
    if not words or words[0] in ("-h", "--help", "help"):
        print(contents())
        return 0
    if words[0] in ("-V", "--version"):
        import amor

        print(f"amor {amor.__version__}")
        return 0
    if words[0] not in verbs():
        print(f"amor: no verb {words[0]!r}; {nearest(words[0], verbs())}", file=sys.stderr)
        return 2
    keep_freed_memory()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a path need not be text, and a terminal need not know every letter
    return run_verb(words[0], words[1:])


def run_verb(verb: str, words: list[str]) -> int:
    module = importlib.import_module(f"amor.cli.{verb}")
    parser = Parser(prog=f"amor {verb}", description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    module.arguments(parser)
    parser.add_argument("--json", action="store_true", help="end with one line of JSON holding what was found")
    args = parser.parse_args(words)
    if any("\0" in word for word in words):
        print(f"amor {verb}: an argument holds a NUL, which no path and no text may", file=sys.stderr)
        return 2
    try:
        found: dict[str, Any] = module.run(args) or {}
    except AmorError as error:
        print(f"amor {verb}: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader of our output has left, e.g. `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:  # a path that the system refuses, wherever a verb meets it
        print(f"amor {verb}: {error.filename or 'the system'}: {error.strerror or error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"\namor {verb}: stopped", file=sys.stderr)
        return 130
    if args.json:
        print(json.dumps(found))
    return found.get("exit", 0 if found.get("ok", True) else 1)
