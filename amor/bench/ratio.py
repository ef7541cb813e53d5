"""The ratio of two sides that took turns: of their bests, and the median of the ratios of each round with an interval.

A round of one side is compared with the round of the other beside it, because what slows a machine down for longer than a
round slows both. The interval is that of order statistics: of n ratios in order the k-th from below and from above, with the
largest k for which they enclose the median with 90 % confidence or more. It supposes that rounds are independent, and of their
distribution nothing; it draws nothing at random. Fewer than five rounds allow no 90 %: then it is the smallest and the largest.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from amor.bench.timing import Times

CONFIDENCE = 0.9


@dataclass(frozen=True)
class Ratio:
    """best: the ratio of the bests. median: of the rounds' ratios; between `low` and `high` with this confidence."""

    best: float
    median: float
    low: float
    high: float
    confidence: float
    rounds: int

    def words(self) -> str:
        return f"best {short(self.best)}x, median {short(self.median)}x [{short(self.low)}, {short(self.high)}]"


def short(value: float) -> str:
    return f"{value:.3f}" if abs(value) < 1 else f"{value:.2f}"


def paired(numerator: Times, denominator: Times, factor: float = 1.0) -> Ratio:
    """The seconds of one side over those of another, times a factor."""
    ratios = [factor * a / b for a, b in zip(numerator.rounds, denominator.rounds, strict=True)]
    best = factor * numerator.best / denominator.best
    return Ratio(best, statistics.median(ratios), *interval(ratios), len(ratios))


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Two of the values, and the confidence with which they enclose the median of what the values were drawn from."""
    ordered, k = sorted(values), 1
    while enclosing(len(ordered), k + 1) >= CONFIDENCE:
        k += 1
    return ordered[k - 1], ordered[-k], enclosing(len(ordered), k)


def enclosing(count: int, k: int) -> float:
    """How surely the k-th from below and from above enclose the median: fewer than k of `count` lie on either side of it."""
    return max(0.0, 1 - 2 * sum(math.comb(count, i) for i in range(k)) / 2**count)
