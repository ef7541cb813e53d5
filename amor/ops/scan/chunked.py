"""The Mamba2 recurrence in matrix form: products inside a chunk, and the state between chunks.

Heads of a group share B and C, so what passes through the state is one product per chunk for all of
them. Kept for the gradient, in floats per row:
T H (2 chunk + 4 P + 2) + T G (chunk + 4 S) + 2 (T / chunk) H P S. Linear in T.
"""

import torch
from torch import Tensor

from amor.ops.chunks import chunk_size
from amor.ops.decays import cut, decays


def scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    state: Tensor | None = None,
    reset: Tensor | None = None,
    D: Tensor | None = None,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """As the reference; chunk: tokens per chunk, by default that of amor/ops/chunks.py."""
    rows, length, heads, size = x.shape
    groups, width = B.shape[2:]
    chunk = min(chunk or chunk_size("scan", "chunked", length, (heads, size, width)), length)
    steps = cut(dt, chunk).transpose(2, 3)  # [B, n, H, Q]
    e = decays(steps * A.float()[:, None], None if reset is None else cut(reset, chunk))
    x_ = cut(x, chunk)
    fed = x_ * steps.mT[..., None]  # [B, n, Q, H, P]
    B_, C_ = (cut(t, chunk).transpose(2, 3) for t in (B, C))  # [B, n, G, Q, S]

    def grouped(t: Tensor) -> Tensor:  # [B, n, Q, H, P] -> [B, n, G, Q, H/G P]
        return t.unflatten(3, (groups, -1)).flatten(4).transpose(2, 3)

    def heads_last(t: Tensor) -> Tensor:  # and back
        return t.transpose(2, 3).unflatten(4, (-1, size)).flatten(3, 4)

    # [B, n, G, H/G P, S] what each chunk adds to the state
    gathered = grouped(fed * e.until.mT[..., None]).mT @ B_
    gathered = gathered.unflatten(3, (-1, size)).flatten(2, 3)
    s = (
        x.new_zeros(rows, heads, size, width, dtype=torch.float32)
        if state is None
        else state.float()
    )
    befores = []
    for added, carry in zip(gathered.unbind(1), e.carry[..., None, None].unbind(1)):
        befores.append(s)
        s = torch.addcmul(added, carry, s)
    before = torch.stack(befores, dim=1).unflatten(2, (groups, -1)).flatten(3, 4)
    readout = heads_last(C_ @ before.mT)

    scores = (C_ @ B_.mT)[:, :, :, None]  # [B, n, G, 1, Q, Q]
    weights = (scores * e.between.unflatten(2, (groups, -1))).flatten(2, 3)
    inside = (weights @ fed.transpose(2, 3)).transpose(2, 3)
    y = torch.addcmul(inside, readout, e.since.mT[..., None])
    if D is not None:
        y = y + x_ * D.float()[:, None]
    return y.flatten(1, 2)[:, :length], s
