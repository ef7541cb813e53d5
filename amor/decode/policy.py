"""Whether to run blocks ahead after one has fired: the one choice of a step that looks at what happened before.

No choice changes a decision or a number, only the time a step takes. An engine is given its policy; tests and benchmarks give
another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

DECAY = 0.98  # of the moving average: what a token ago counts, the present one counting 1
REFIRE_MIN = 0.7  # share of firings that another block's firing has to follow for running ahead to pay


class Policy(Protocol):
    def foresees(self) -> bool:
        """Whether the blocks after one that fired are expected to fire too."""
        ...

    def observe(self, fires: Sequence[Sequence[bool]]) -> None:
        """Take in what one token of some rows did: block by block, which rows fired."""
        ...


@dataclass
class Follow:
    """Foresees while firings of late were followed by others."""

    refire_rate: float = 0.0

    def foresees(self) -> bool:
        return self.refire_rate > REFIRE_MIN

    def observe(self, fires: Sequence[Sequence[bool]]) -> None:
        for row in zip(*fires, strict=True):
            for index, fired in enumerate(row[:-1]):
                if fired:
                    self.refire_rate += (1 - DECAY) * (any(row[index + 1 :]) - self.refire_rate)


@dataclass(frozen=True)
class Fixed:
    """Always or never."""

    foresee: bool

    def foresees(self) -> bool:
        return self.foresee

    def observe(self, fires: Sequence[Sequence[bool]]) -> None:
        pass
