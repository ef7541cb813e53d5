"""When to speculate: run later blocks ahead after one has fired, by how often that paid so far.

No policy changes a decision or a number, only the time of a step. Tests and benchmarks give an
engine another policy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

DECAY = 0.98  # of the EMA, per firing
REFIRE_MIN = 0.7  # fraction of firings followed by another block's above which speculation pays


class Policy(Protocol):
    """Decides whether an engine speculates."""

    def speculates(self) -> bool:
        """Whether the blocks after one that fired are expected to fire too."""
        ...

    def observe(self, fires: Sequence[Sequence[bool]]) -> None:
        """Update by the decisions of a step: per row, which blocks fired."""
        ...


@dataclass
class Follow:
    """Speculates while recent firings were followed by others."""

    refire_rate: float = 0.0

    def speculates(self) -> bool:
        return self.refire_rate > REFIRE_MIN

    def observe(self, fires: Sequence[Sequence[bool]]) -> None:
        for row in fires:
            for index, fired in enumerate(row[:-1]):
                if fired:
                    self.refire_rate += (1 - DECAY) * (any(row[index + 1 :]) - self.refire_rate)


@dataclass(frozen=True)
class Fixed:
    """Always or never speculates."""

    speculate: bool

    def speculates(self) -> bool:
        return self.speculate

    def observe(self, fires: Sequence[Sequence[bool]]) -> None:
        pass
