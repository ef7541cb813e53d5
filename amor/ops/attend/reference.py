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
    scores = (q @ k.mT).float() * q.shape[-1] ** -0.5
    if causal:
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()[None]
    if mask is not None:
        scores = scores.masked_fill(~mask[:, None], -torch.inf)
    return scores.softmax(-1).to(v.dtype) @ v
