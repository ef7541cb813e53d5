"""RMS norm, SwiGLU and rotary embedding: the definition.

Float32 inside, the dtype of the input outside.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight; x [..., n], weight [n]."""
    return F.rms_norm(x.float(), weight.shape, weight.float(), eps).to(x.dtype)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, [..., n] each."""
    return (F.silu(gate.float()) * up.float()).to(gate.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (i, i + size/2) of x [..., heads, size] by its position's angle.

    cos, sin: [..., size/2].
    """
    a, b = x.float().chunk(2, dim=-1)
    cos, sin = cos[..., None, :], sin[..., None, :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)
