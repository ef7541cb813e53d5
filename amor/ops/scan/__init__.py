"""scan: the Mamba2 recurrence. `reference.py` defines it."""

from torch import Tensor

from amor.ops.backends import backend


def scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    state: Tensor | None = None,
    reset: Tensor | None = None,
    D: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """As reference.py defines it."""
    return backend("scan", x).scan(x, dt, A, B, C, state, reset, D)
