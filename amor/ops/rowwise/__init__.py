"""rowwise: what is done to a token by itself between products: RMS norm, SwiGLU, rotary turn. `reference.py` defines them."""

from torch import Tensor

from amor.ops.backends import backend


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return backend("rowwise", x).norm(x, weight, eps)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return backend("rowwise", gate).swiglu(gate, up)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return backend("rowwise", x).rotate(x, cos, sin)
