"""conv: the short causal convolution and its SiLU. `reference.py` defines it."""

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
    """As reference.py defines it."""
    return backend("conv", x).conv(x, weight, bias, window, lengths, reset)
