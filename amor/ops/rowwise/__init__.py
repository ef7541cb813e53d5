"""rowwise: RMS norm, SwiGLU and rotary embedding, which treat every token by itself.

`reference.py` defines them.
"""

from torch import Tensor

from amor.ops.backends import backend


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight; x [..., n], weight [n]."""
    return backend("rowwise", x).norm(x, weight, eps)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, [..., n] each."""
    return backend("rowwise", gate).swiglu(gate, up)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [..., heads, size]; cos, sin [..., size/2]."""
    return backend("rowwise", x).rotate(x, cos, sin)
