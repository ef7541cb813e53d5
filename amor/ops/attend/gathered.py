"""Attention of the queries that fired only; rows without one cost nothing."""

import torch
import torch.nn.functional as F
from torch import Tensor


def attend(
    q: Tensor,  # [n, H, d] the fired queries of all rows, row after row
    k: Tensor,  # [B, H, L, d]
    v: Tensor,  # [B, H, L, d]
    rows: Tensor,  # [n] the row of each query, ascending
    mask: Tensor | None = None,  # [n, L] what each query may see; None: everything
) -> Tensor:  # [n, H, d]
    """Every query against the keys of its row."""
    if not len(q):
        return q
    batch, counts = torch.unique_consecutive(rows, return_counts=True)
    out, start = [], 0
    for row, count in zip(batch.tolist(), counts.tolist(), strict=True):
        part = slice(start, start + count)
        seen = None if mask is None else mask[part][None, None]
        a = F.scaled_dot_product_attention(
            q[part].transpose(0, 1)[None], k[row][None], v[row][None], attn_mask=seen
        )
        out.append(a[0].transpose(0, 1))
        start += count
    return torch.cat(out)
