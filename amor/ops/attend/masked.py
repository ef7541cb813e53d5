"""Queries, each against the first keys of its row, by torch: the definition of what the gated block and the decode step do."""

import torch
from torch import Tensor

from amor.ops.attend.dense import attend as dense
from amor.ops.attend.gathered import attend as gathered


def attend(q: Tensor, k: Tensor, v: Tensor, rows: Tensor, lengths: Tensor) -> Tensor:
    """q [n, H, d], k and v [B, H, L, d], rows and lengths [n] -> [n, H, d]."""
    order = torch.argsort(rows, stable=True)
    mask = torch.arange(k.shape[2], device=k.device) < lengths[order][:, None]
    out = torch.empty_like(q)
    out[order] = gathered(q[order], k, v, rows[order], mask)
    return out


def fired(q: Tensor, k: Tensor, v: Tensor, rows: Tensor, lengths: Tensor) -> Tensor:
    """The same with gradients, for rows that ascend."""
    return gathered(q, k, v, rows, torch.arange(k.shape[2], device=k.device) < lengths[:, None])


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return dense(q, k, v, causal=True)


def upto(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    return dense(q, k, v, torch.arange(k.shape[2], device=k.device) < lengths[..., None])
