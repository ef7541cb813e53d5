"""A ratio is that of rounds that belong together, and its interval holds what it says."""

import random

import pytest

from amor.bench.ratio import coverage, interval, paired
from amor.bench.timing import from_rounds


def test_the_interval_holds_the_median_as_surely_as_it_says() -> None:
    assert [round(coverage(n, 1), 4) for n in (1, 2, 5)] == [0, 0.5, 0.9375]
    assert interval([3.0]) == (3, 3, 0) and interval([5, 1, 4, 2, 3]) == (1, 5, 0.9375)
    assert interval(list(range(8)))[:2] == (1, 6) and interval(list(range(11)))[:2] == (2, 8)
    for n in range(5, 40):
        low, high, confidence = interval(list(range(n)))
        assert low + high == n - 1 and confidence >= 0.9 > coverage(n, low + 2), (
            "as narrow as 90 % allow"
        )


def test_the_interval_contains_the_true_ratio_on_a_restless_machine() -> None:
    random.seed(0)
    inside, best_off, median_off = 0, 0.0, 0.0
    for _ in range(400):
        slow, fast = [], []
        for _ in range(9):
            neighbours = 1 + random.expovariate(2)  # slow both sides of a round alike
            slow.append(1.25 * neighbours * random.lognormvariate(0, 0.03))
            fast.append(1.00 * neighbours * random.lognormvariate(0, 0.03))
        ratio = paired(from_rounds(slow), from_rounds(fast))
        inside += ratio.low <= 1.25 <= ratio.high
        best_off += abs(ratio.best - 1.25) / 400
        median_off += abs(ratio.median - 1.25) / 400
        assert ratio.high - ratio.low < 0.4, "what both sides met alike does not widen it"
    assert inside / 400 >= 0.93  # 0.961 of nine rounds
    assert median_off < best_off


def test_rounds_are_compared_with_those_beside_them() -> None:
    ratio = paired(from_rounds([2, 40, 6]), from_rounds([1, 2, 10]))
    assert (ratio.best, ratio.median, ratio.low, ratio.high, ratio.rounds) == (2, 2, 0.6, 20, 3)
    assert str(ratio) == "best 2.00x, median 2.00x [0.600, 20.00]"
    assert paired(from_rounds([2.0]), from_rounds([1.0]), factor=0.25).median == 0.5
    with pytest.raises(ValueError, match="longer"):  # sides that did not take turns have no pairs
        paired(from_rounds([1.0]), from_rounds([1.0, 2.0]))
