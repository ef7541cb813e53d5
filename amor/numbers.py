"""Numbers as JSON and tables hold them."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

AT_ONCE = 1 << 22  # numbers that `bootstrap_draws` gathers at a time: 32 MB


def finite(value: float) -> float | None:
    """The number, or None for NaN and infinity, which JSON cannot hold."""
    return value if math.isfinite(value) else None


def perplexity(nll: float) -> float:
    """exp of a mean negative log-likelihood in nats per token."""
    return math.exp(min(nll, 700.0))  # exp of more overflows a float


def bootstrap_draws(
    statistic: Callable[..., Any],
    samples: Sequence[np.ndarray],  # [n] each
    draws: int,
    random: int | np.random.Generator,
) -> np.ndarray:
    """[draws] statistic(*samples, axis) of n places drawn with replacement, the same in all samples
    of a draw (a paired bootstrap). The same `random` draws the same places."""
    import numpy as np
    from scipy.stats import DegenerateDataWarning, bootstrap

    count = len(samples[0])
    if count == 1:  # every draw is the one place
        return np.full(draws, statistic(*samples, axis=0))
    how: dict[str, Any] = {"n_resamples": draws, "batch": max(AT_ONCE // count, 1), "rng": random}
    how |= {"method": "percentile", "paired": True, "vectorized": True}
    with warnings.catch_warnings():
        # of the interval, which is not used; all draws may be equal
        warnings.simplefilter("ignore", DegenerateDataWarning)
        distribution: np.ndarray = bootstrap(samples, statistic, **how).bootstrap_distribution
    return distribution
