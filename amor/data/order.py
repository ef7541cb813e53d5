"""The order of the data: a permutation of 0 .. n-1 that is computed, not stored.

A balanced Feistel network over the next power of four above n, walked until the value falls inside
(format-preserving encryption). It needs no memory at any n, answers any position at once, which is
what makes resuming cost one integer, and is plain 64-bit arithmetic of ours: numpy promises no
fixed stream for `Generator.permutation` from one version to the next.
"""

import numpy as np

ROUNDS = 6
MASK = (1 << 64) - 1


def permuted(positions: np.ndarray, n: int, seed: int, epoch: int) -> np.ndarray:
    """Where the order of this seed and epoch sends each position; int64 in, int64 out, both in [0,
    n).
    """
    half = max(1, ((n - 1).bit_length() + 1) // 2)  # bits in each half of the network
    keys = [
        mixed_number(mixed_number(seed) ^ mixed_number((epoch << 8) + r)) for r in range(ROUNDS)
    ]
    values = _network(positions.astype(np.uint64), half, keys)
    outside = values >= n
    while (
        outside.any()
    ):  # each walk ends: it follows a cycle that begins inside; under 4 rounds on average
        values[outside] = _network(values[outside], half, keys)
        outside = values >= n
    return values.astype(np.int64)


def _network(values: np.ndarray, half: int, keys: list[int]) -> np.ndarray:
    bits, low = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = values >> bits, values & low
    for key in keys:
        left, right = right, left ^ (mixed(right ^ np.uint64(key)) & low)
    return (left << bits) | right


def mixed(x: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64: every bit of the input moves every bit of the output. Arithmetic
    is modulo 2^64.
    """
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def mixed_number(x: int) -> int:
    """One output of splitmix64 from the state x."""
    return int(mixed(np.array([(x + 0x9E3779B97F4A7C15) & MASK], dtype=np.uint64))[0])
