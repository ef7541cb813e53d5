"""A config.json of another library read key by key.

A missing key has that library's default, and a value that our model cannot have is refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from amor.errors import AmorError

# key of ours -> (key of theirs, their default; None where the key must be there)
Sizes = Mapping[str, tuple[str, int | None]]
# key of theirs -> (values that our model can have, the usual one first; why no other)
Required = Mapping[str, tuple[tuple[Any, ...], str]]


class Settings:
    """Keys of a config.json; `where` begins the error messages."""

    def __init__(self, tree: Mapping[str, Any], where: str):
        self.tree, self.where = tree, where

    def __getitem__(self, key: str) -> Any:
        return self.tree.get(key)

    def count(self, key: str, default: int | None = None) -> int:
        """A whole number above 0."""
        value = default if self[key] is None else self[key]
        if type(value) is not int or value < 1:
            raise AmorError(f"{self.where}: {key} is {value!r}; a whole number above 0 is needed")
        return value

    def counts(self, sizes: Sizes) -> dict[str, Any]:
        """Several of `count`, by our keys."""
        return {ours: self.count(theirs, default) for ours, (theirs, default) in sizes.items()}

    def real(self, key: str, default: float) -> float:
        """A finite number."""
        value = default if self[key] is None else self[key]
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not math.isfinite(value):
            raise AmorError(f"{self.where}: {key} is {value!r}; a number is needed")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        value = default if self[key] is None else self[key]
        if not isinstance(value, bool):
            raise AmorError(f"{self.where}: {key} is {value!r}; true or false is needed")
        return value

    def only(self, key: str, allowed: tuple[Any, ...], why: str) -> None:
        """Refuse a key that is neither missing, null, nor one of `allowed`."""
        if self[key] is not None and self[key] not in allowed:
            raise AmorError(f"{self.where}: {key} is {str(self[key])[:80]}; {why}")

    def require(self, required: Required) -> None:
        """`only`, of several keys."""
        for key, (allowed, why) in required.items():
            self.only(key, allowed, why)
