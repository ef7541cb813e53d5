"""Random numbers that are computed, not drawn: those of a row are a function of its key alone.

splitmix64 by counter, plain 64-bit arithmetic as in order.py: no state and no generator of numpy or
torch, so the numbers do not depend on how many rows are made at a time. Every call takes a stream
of its own, however many numbers it needs.
"""

import numpy as np

from amor.data.order import MASK, mixed, mixed_number

GOLDEN = 0x9E3779B97F4A7C15
# training, validation during training, and the final evaluation
STREAMS = ("train", "valid", "test")


def row_keys(seed: int, stream: str, step: int, first: int, last: int) -> np.ndarray:
    """The keys of rows first .. last - 1 of a step, uint64."""
    above = mixed_number(mixed_number(mixed_number(seed) + STREAMS.index(stream)) + step)
    return _counted(np.array([above], dtype=np.uint64), np.arange(first, last))[0]


class Chance:
    """Numbers for rows of these keys: [rows, count] at a call."""

    def __init__(self, keys: np.ndarray):
        self.keys, self.calls = keys, 0

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self.keys)

    def below(self, high: int | np.ndarray, count: int) -> np.ndarray:
        """Uniform integers in [0, high); high: one for all rows, or [rows, 1]."""
        return _scaled(self._bits(count), high)

    def shares(self, count: int) -> np.ndarray:
        """Numbers in (0, 1)."""
        return ((self._bits(count) >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52

    def distinct(self, high: int, count: int) -> np.ndarray:
        """Integers in [0, high) without repetition, every sequence equally likely."""
        if high < 4 * count:
            return np.argsort(self._bits(high), axis=1, kind="stable")[:, :count]
        keys = self._stream()
        values = _scaled(_counted(keys, np.arange(count)), high)
        tries = 0
        # repetitions are drawn again; no value is favoured, so no sequence is
        while (again := _repeated(values)).any():
            tries += 1
            others = _scaled(_counted(keys, np.arange(count) + tries * count), high)
            values = np.where(again, others, values)
        return values

    def ranked(self, weights: np.ndarray, count: int) -> np.ndarray:
        """`count` different places of `weights`, one after the other by their weight among those
        that are left.
        """
        races = (
            -np.log(self.shares(len(weights))) / weights
        )  # the first to arrive of exponential clocks
        return np.argsort(races, axis=1, kind="stable")[:, :count]

    def _bits(self, count: int) -> np.ndarray:
        return _counted(self._stream(), np.arange(count))

    def _stream(self) -> np.ndarray:
        self.calls += 1
        return _counted(self.keys, np.array([-self.calls]))[:, 0]


def _counted(keys: np.ndarray, places: np.ndarray) -> np.ndarray:
    """[keys, places] 64 bits each."""
    steps = np.array([((int(place) + 1) * GOLDEN) & MASK for place in places], dtype=np.uint64)
    return mixed(mixed(keys)[:, None] + steps)


def _scaled(bits: np.ndarray, high: int | np.ndarray) -> np.ndarray:
    return ((bits >> np.uint64(11)).astype(np.float64) * 2.0**-53 * high).astype(np.int64)


def _repeated(values: np.ndarray) -> np.ndarray:
    """True at values that are also further left in their row."""
    order = np.argsort(values, axis=1, kind="stable")
    ordered = np.take_along_axis(values, order, 1)
    marks = np.zeros(values.shape, dtype=bool)
    np.put_along_axis(marks, order[:, 1:], ordered[:, 1:] == ordered[:, :-1], 1)
    return marks
