"""conv: the short causal convolution and its SiLU. `reference.py` says what it is."""

from torch import Tensor

from amor.ops.backends import backend


def conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    window: Tensor | None = None,
    lengths: Tensor | None = None,
    reset: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    return backend("conv", x).conv(x, weight, bias, window, lengths, reset)


def step(x: Tensor, weight: Tensor, bias: Tensor | None, window: Tensor, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """One token a row without a gradient; the window after it is written into `out`, which may be `window` itself."""
    chosen = backend("conv", x)
    if hasattr(chosen, "step"):
        return chosen.step(x, weight, bias, window, out)
    y, after = chosen.conv(x, weight, bias, window)
    return y, after if out is None else out.copy_(after)
