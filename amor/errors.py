"""The one error a user can cause: what was given, what would be right, and what to do."""

import difflib
from collections.abc import Iterable


class AmorError(ValueError):
    """A wrong input. Commands print it as one line and leave with exit code 2."""


def nearest(word: str, choices: Iterable[str]) -> str:
    """A hint that names the closest right choice, then all of them."""
    names = sorted(choices)
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.4)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{hint}choices: {', '.join(names)}"
