"""The gated delta rule in matrix form: inside a chunk one triangular system, from chunk to chunk its state.

With e the decays inside a chunk (never above 1), the corrected values u solve

    (1 + tril(beta (k k^T) e, -1)) u = beta (v - since k s)

Kept for the gradient, in floats a row: T H (6 chunk + 8 K + 3 V + 3) + (T / chunk) H K V; linear in T.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from amor.ops.chunks import chunk_size
from amor.ops.decays import cut, decays


def delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor | None = None,
    reset: Tensor | None = None,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    rows, length, heads, size = k.shape
    values = v.shape[-1]
    chunk = min(chunk or chunk_size("delta", "chunked", length, (heads, size, values)), length)
    q_, k_, v_, g_, beta_ = (cut(t, chunk).transpose(2, 3) for t in (q, k, v, g, beta))  # [B, n, H, Q, ...]
    e = decays(g_, None if reset is None else cut(reset, chunk))
    strength, since = beta_[..., None], e.since[..., None]

    inverse = UnitLowerInverse.apply((strength * (k_ @ k_.mT) * e.between).tril(-1))
    own, against = (inverse @ torch.cat([strength * v_, strength * since * k_], dim=-1)).split([values, size], dim=-1)
    scores = (q_ @ k_.mT) * e.between
    asked, kept = q_ * since, (k_ * e.until[..., None]).mT

    s = q.new_zeros(rows, heads, size, values, dtype=torch.float32) if state is None else state.float()
    outputs = []
    parts = (t.unbind(1) for t in (own, against, asked, scores, kept, e.carry[..., None, None]))
    for mine, against_i, asked_i, scores_i, kept_i, carry in zip(*parts):
        u = mine - against_i @ s
        outputs.append(asked_i @ s + scores_i @ u)
        s = torch.addcmul(kept_i @ u, carry, s)
    return torch.stack(outputs, dim=1).transpose(2, 3).flatten(1, 2)[:, :length], s


class UnitLowerInverse(torch.autograd.Function):
    """(1 + L)^-1 for L strictly lower triangular [..., Q, Q].

    Substitution by blocks that double: each block row is solved exactly from those above it. No series is summed, so
    nothing grows that the answer does not hold.
    """

    @staticmethod
    def forward(ctx: Any, L: Tensor) -> Tensor:
        size = L.shape[-1]
        full = 1 << (size - 1).bit_length()
        inverse = torch.eye(full, dtype=L.dtype, device=L.device).expand(*L.shape[:-2], full, full).clone()
        padded = torch.nn.functional.pad(L, (0, full - size, 0, full - size)) if full > size else L
        half = 1
        while half < full:
            pairs = range(0, full, 2 * half)
            # the square below the diagonal of each pair of blocks: -(lower right inverse) L (upper left inverse)
            first = torch.stack([inverse[..., i : i + half, i : i + half] for i in pairs], dim=-3)
            second = torch.stack([inverse[..., i + half : i + 2 * half, i + half : i + 2 * half] for i in pairs], dim=-3)
            below = torch.stack([padded[..., i + half : i + 2 * half, i : i + half] for i in pairs], dim=-3)
            solved = second @ below @ first
            for index, i in enumerate(pairs):
                inverse[..., i + half : i + 2 * half, i : i + half] = -solved[..., index, :, :]
            half *= 2
        inverse = inverse[..., :size, :size]
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (inverse,) = ctx.saved_tensors
        return -(inverse.mT @ grad @ inverse.mT).tril(-1)
