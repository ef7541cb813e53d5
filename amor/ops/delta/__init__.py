"""delta: the gated delta rule. `reference.py` says what it is."""

from torch import Tensor

from amor.ops.backends import backend


def delta(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None = None, reset: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    return backend("delta", q).delta(q, k, v, g, beta, state, reset)


def step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """A few tokens without a gradient; the state after them is written into `out`, which may be `state` itself."""
    chosen = backend("delta", q)
    if hasattr(chosen, "step"):
        return chosen.step(q, k, v, g, beta, state, out)
    o, after = chosen.delta(q, k, v, g, beta, state)
    return o, after if out is None else out.copy_(after)
