"""attend: softmax attention, for all queries or only for those that fired.

A compiled decode step runs step.h instead.
"""

import torch
from torch import Tensor

from amor.ops.attend.dense import attend as by_torch
from amor.ops.attend.gathered import attend as gathered
from amor.ops.attend.reference import attend as reference
from amor.ops.backends import backend

__all__ = ["dense", "fired", "gathered", "reference", "upto"]


def dense(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = False
) -> Tensor:
    """q [B, H, T, d] against k, v [B, H, L, d] -> [B, H, T, d].

    causal: query t sees keys 0..t; mask: [B, T, L] True where a query sees a key; neither: all.
    """
    if causal and q.dtype == torch.float32:
        return backend("attend", q).causal(q, k, v)
    return by_torch(q, k, v, mask, causal)


def upto(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    """Each query of q [B, H, T, d] against the first `lengths` [B, T] keys of its row of
    k, v [B, H, L, d] -> [B, H, T, d]."""
    if q.dtype == torch.float32:
        return backend("attend", q).upto(q, k, v, lengths)
    return by_torch(q, k, v, torch.arange(k.shape[2], device=k.device) < lengths[..., None])


def fired(q: Tensor, k: Tensor, v: Tensor, rows: Tensor, lengths: Tensor) -> Tensor:
    """Queries q [n, H, d] sorted by row, query i against the first lengths[i] keys of row rows[i]
    of k, v [B, H, L, d] -> [n, H, d]."""
    return backend("attend", q).fired(q, k, v, rows, lengths)
