"""gated_norm: RMS norm and a SiLU gate, in either order. `reference.py` defines both."""

from torch import Tensor

from amor.ops.backends import backend


def gate_norm(x: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The gate, then the norm, as Mamba2 has it; x, z [..., n], weight [n]."""
    return backend("gated_norm", x).gate_norm(x, z, weight, eps)


def norm_gate(x: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The norm, then the gate, as Gated DeltaNet has it; x, z [..., n], weight [n]."""
    return backend("gated_norm", x).norm_gate(x, z, weight, eps)
