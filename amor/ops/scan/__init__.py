"""scan: the Mamba2 recurrence. `reference.py` says what it is."""

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
    return backend("scan", x).scan(x, dt, A, B, C, state, reset, D)


def step(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Tensor, D: Tensor | None = None, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """A few tokens without a gradient; the state after them is written into `out`, which may be `state` itself."""
    chosen = backend("scan", x)
    if hasattr(chosen, "step"):
        return chosen.step(x, dt, A, B, C, state, D, out)
    y, after = chosen.scan(x, dt, A, B, C, state, None, D)
    return y, after if out is None else out.copy_(after)
