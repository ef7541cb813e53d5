"""Softmax attention written out: every query against every key it may see. The definition."""

import torch
from torch import Tensor


def attend(
    q: Tensor,  # [B, H, T, d]
    k: Tensor,  # [B, H, L, d]
    v: Tensor,  # [B, H, L, d]
    mask: Tensor | None = None,  # [B, T, L] what a query may see; None: everything
    causal: bool = False,  # query t sees keys 0..t
) -> Tensor:  # [B, H, T, d]
    """softmax(q k^T / sqrt(d)) v over the keys that a query may see."""
    scores = (q @ k.mT).float() * q.shape[-1] ** -0.5
    if causal:
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()[None]
    if mask is not None:
        scores = scores.masked_fill(~mask[:, None], -torch.inf)
    return scores.softmax(-1).to(v.dtype) @ v


def fired(q: Tensor, k: Tensor, v: Tensor, rows: Tensor, lengths: Tensor) -> Tensor:
    """Queries q [n, H, d] sorted by row, query i against the first lengths[i] keys of row rows[i]
    of k, v [B, H, L, d] -> [n, H, d]."""
    if not len(q):
        return q
    mask = torch.arange(k.shape[2], device=k.device) < lengths[:, None]
    out = []
    for row in rows.unique().tolist():
        here = rows == row
        of_row = attend(q[here].transpose(0, 1)[None], k[row][None], v[row][None], mask[here][None])
        out.append(of_row[0].transpose(0, 1))
    return torch.cat(out)


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Query t of q [B, H, T, d] against keys 0..t -> [B, H, T, d]."""
    return attend(q, k, v, causal=True)


def upto(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    """Each query of q [B, H, T, d] against the first `lengths` [B, T] keys -> [B, H, T, d]."""
    return attend(q, k, v, torch.arange(k.shape[2], device=k.device) < lengths[..., None])
