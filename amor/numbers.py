"""Numbers as files and people take them."""

import math


def finite(value: float) -> float | None:
    """A number JSON can hold; None where there is none."""
    return value if math.isfinite(value) else None


def perplexity(nll: float) -> float:
    return math.exp(
        min(nll, 700.0)
    )  # past 700 a float overflows; such a model knows nothing anyway
