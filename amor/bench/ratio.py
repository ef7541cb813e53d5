"""Ratios of two sides that took turns: of their best rounds, and the median over rounds with a
confidence interval.

A round of one side is compared with the round of the other that ran next to it, because what slows
a machine down for longer than a round slows both. The interval comes from order statistics: of n
sorted ratios the k-th smallest and the k-th largest, with the largest k for which they enclose the
median with at least 90 % confidence. It assumes that rounds are independent and nothing about their
distribution, and draws nothing at random. Fewer than five rounds cannot give 90 %: the interval is
then from the smallest to the largest ratio.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from amor.bench.timing import Timings

CONFIDENCE = 0.9


@dataclass(frozen=True)
class PairedRatio:
    """The ratio of two sides' seconds."""

    best: float  # best round over best round
    median: float  # median of the ratios of paired rounds
    low: float  # the confidence interval of that median
    high: float
    confidence: float  # probability that the interval encloses the median
    rounds: int

    def __str__(self) -> str:
        median = f"median {short(self.median)}x [{short(self.low)}, {short(self.high)}]"
        return f"best {short(self.best)}x, {median}"


def short(value: float) -> str:
    """A ratio with three decimals below 1 and two above."""
    return f"{value:.3f}" if abs(value) < 1 else f"{value:.2f}"


def paired(numerator: Timings, denominator: Timings, factor: float = 1.0) -> PairedRatio:
    """The seconds of one side over those of another that took turns with it, times a factor."""
    pairs = zip(numerator.rounds, denominator.rounds, strict=True)
    ratios = [factor * a / b for a, b in pairs]
    best = factor * numerator.best / denominator.best
    return PairedRatio(best, statistics.median(ratios), *interval(ratios), len(ratios))


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Two of the values, and the confidence that they enclose the median of the distribution the
    values come from."""
    ordered, k = sorted(values), 1
    while coverage(len(ordered), k + 1) >= CONFIDENCE:
        k += 1
    return ordered[k - 1], ordered[-k], coverage(len(ordered), k)


def coverage(count: int, k: int) -> float:
    """Probability that the k-th smallest and the k-th largest of `count` values enclose the
    median."""
    return max(0.0, 1 - 2 * sum(math.comb(count, i) for i in range(k)) / 2**count)
