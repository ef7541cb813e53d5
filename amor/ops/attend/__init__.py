"""attend: softmax attention, for all queries, for those that fired, or for the lone query a row of a decode step."""

import torch
from torch import Tensor

from amor.ops.attend.dense import attend as by_torch
from amor.ops.attend.gathered import attend as gathered
from amor.ops.attend.reference import attend as reference
from amor.ops.backends import backend
from amor.ops.spent import someone_counts, spend

__all__ = ["dense", "fired", "gathered", "reference", "single", "upto"]


def dense(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
    """q [B, H, T, d] against k, v [B, H, L, d] -> [B, H, T, d]; causal: query t sees keys 0..t, or a mask [B, T, L] says."""
    if causal and q.dtype == torch.float32:
        return backend("attend", q).causal(q, k, v)
    return by_torch(q, k, v, mask, causal)


def upto(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    """q [B, H, T, d], each query against the first `lengths` [B, T] keys of its row of k, v [B, H, L, d] -> [B, H, T, d]."""
    if q.dtype == torch.float32:
        return backend("attend", q).upto(q, k, v, lengths)
    return by_torch(q, k, v, torch.arange(k.shape[2], device=k.device) < lengths[..., None])


def single(q: Tensor, k: Tensor, v: Tensor, rows: Tensor, lengths: Tensor) -> Tensor:
    """q [n, H, d] float32, each against the first `lengths` keys of its row of k, v [B, H, L, d] -> [n, H, d]."""
    if someone_counts():
        numbers = int(lengths.sum()) * q.shape[1] * q.shape[2]
        spend("attention", 4 * numbers, 2 * 4 * numbers)
    return backend("attend", q).attend(q, k, v, rows, lengths)


def fired(q: Tensor, k: Tensor, v: Tensor, rows: Tensor, lengths: Tensor) -> Tensor:
    """q [n, H, d], row after row, each against the first `lengths` keys of its row of k, v [B, H, L, d] -> [n, H, d]."""
    return backend("attend", q).fired(q, k, v, rows, lengths)
