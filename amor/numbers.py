"""Numbers as JSON and tables hold them."""

import math


def finite(value: float) -> float | None:
    """The number, or None for NaN and infinity, which JSON cannot hold."""
    return value if math.isfinite(value) else None


def perplexity(nll: float) -> float:
    """exp of a mean negative log-likelihood in nats per token."""
    return math.exp(min(nll, 700.0))  # exp of more overflows a float
