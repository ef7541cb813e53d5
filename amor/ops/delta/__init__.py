"""delta: the gated delta rule. `reference.py` defines it."""

from torch import Tensor

from amor.ops.backends import backend


def delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor | None = None,
    reset: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """As reference.py defines it."""
    return backend("delta", q).delta(q, k, v, g, beta, state, reset)
