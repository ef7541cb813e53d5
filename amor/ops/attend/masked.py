"""Attention by torch's fused kernel: keys past the first ones of a row are masked."""

import torch
from torch import Tensor

from amor.ops.attend.dense import attend as dense
from amor.ops.attend.gathered import attend as gathered


def fired(q: Tensor, k: Tensor, v: Tensor, rows: Tensor, lengths: Tensor) -> Tensor:
    """Queries q [n, H, d] sorted by row, query i against the first lengths[i] keys of row rows[i]
    of k, v [B, H, L, d] -> [n, H, d]."""
    return gathered(q, k, v, rows, torch.arange(k.shape[2], device=k.device) < lengths[:, None])


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Query t of q [B, H, T, d] against keys 0..t -> [B, H, T, d]."""
    return dense(q, k, v, causal=True)


def upto(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    """Each query of q [B, H, T, d] against the first `lengths` [B, T] keys -> [B, H, T, d]."""
    return dense(q, k, v, torch.arange(k.shape[2], device=k.device) < lengths[..., None])
