"""gated_norm: RMS norm and a SiLU gate, in either order. `reference.py` says what they are."""

from torch import Tensor

from amor.ops.backends import backend


def gate_norm(x: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    return backend("gated_norm", x).gate_norm(x, z, weight, eps)


def norm_gate(x: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    return backend("gated_norm", x).norm_gate(x, z, weight, eps)
