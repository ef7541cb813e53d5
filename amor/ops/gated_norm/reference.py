"""RMS norm over the last dimension and a SiLU gate, in either order: the definition.

Float32 inside, the dtype of z outside.
"""

import torch.nn.functional as F
from torch import Tensor


def gate_norm(x: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    """First the gate, then the norm, as Mamba2 does; x, z [..., n], weight [n]."""
    return F.rms_norm(x.float() * F.silu(z.float()), weight.shape, weight.float(), eps).to(z.dtype)


def norm_gate(x: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    """First the norm, then the gate, as Gated DeltaNet does; x, z [..., n], weight [n]."""
    return (F.rms_norm(x.float(), weight.shape, weight.float(), eps) * F.silu(z.float())).to(
        z.dtype
    )
