"""The one error a user can cause: its message says what was given, what would be right, and what to do."""

import difflib
from collections.abc import Iterable


class AmorError(ValueError):
    """A wrong input. Commands print it as one line and leave with exit code 2."""


def install_hint(extra: str) -> str:
    """How to install an extra of this package; no package index has amor, so its name alone would
    install nothing, or somebody else's package.
    """
    checkout = f'pip install -e ".[{extra}]" in a checkout of amor'
    return f'{checkout}, or pip install "amor[{extra}] @ git+URL" with the URL of its repository'


def nearest(word: str, choices: Iterable[str]) -> str:
    """A hint that names the closest right choice, then all of them."""
    names = sorted(choices)
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.4)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{hint}choices: {', '.join(names)}"
