"""The gated delta rule in matrix form: one triangular system per chunk, and the state between.

With e the decays inside a chunk (never above 1), the corrected values u solve

    (1 + tril(beta (k k^T) e, -1)) u = beta (v - since k s)

Where every channel has a decay of its own (KDA), e stands inside the sum over channels:
`by_channel`.

Kept for the gradient, in floats per row: T H (6 chunk + 8 K + 3 V + 3) + (T / chunk) H K V; with a
decay per channel T H (3 chunk + (2.5 log2 chunk + 9) K + 3 V) + (T / chunk) H K V. Linear in T.
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
    """As the reference; chunk: tokens per chunk, by default that of amor/ops/chunks.py."""
    rows, length, heads, size = k.shape
    values = v.shape[-1]
    chunk = min(chunk or chunk_size("delta", "chunked", length, (heads, size, values)), length)
    if g.ndim == 4:
        chunk = 1 << (chunk - 1).bit_length()  # its blocks double
    # [B, n, H, Q, ...]
    q_, k_, v_, g_, beta_ = (cut(t, chunk).transpose(2, 3) for t in (q, k, v, g, beta))
    begins, strength = None if reset is None else cut(reset, chunk), beta_[..., None]
    if g.ndim == 4:
        same, scores, since, until, carry = by_channel(q_, k_, g_, begins)
        system = strength * same
    else:
        e = decays(g_, begins)
        system, scores = strength * (k_ @ k_.mT) * e.between, (q_ @ k_.mT) * e.between
        since, until, carry = e.since[..., None], e.until[..., None], e.carry[..., None, None]

    inverse = _UnitLowerInverse.apply(system.tril(-1))
    own, against = (inverse @ torch.cat([strength * v_, strength * since * k_], dim=-1)).split(
        [values, size], dim=-1
    )
    queries, keys = q_ * since, (k_ * until).mT

    s = (
        q.new_zeros(rows, heads, size, values, dtype=torch.float32)
        if state is None
        else state.float()
    )
    outputs = []
    parts = (t.unbind(1) for t in (own, against, queries, scores, keys, carry))
    for own_i, against_i, queries_i, scores_i, keys_i, carry_i in zip(*parts):
        u = own_i - against_i @ s
        outputs.append(queries_i @ s + scores_i @ u)
        s = torch.addcmul(keys_i @ u, carry_i, s)
    return torch.stack(outputs, dim=1).transpose(2, 3).flatten(1, 2)[:, :length], s


def by_channel(q: Tensor, k: Tensor, logs: Tensor, begins: Tensor | None) -> tuple[Tensor, ...]:
    """KDA: k k^T and q k^T [.., Q, Q] with decays inside their sums over channels.

    And the decays since, until [.., Q, K] and carry [.., K, 1]. As in `decays`, running sums are
    float64, and no exponent is above 0.
    """
    total = logs.to(torch.float32 if logs.device.type == "mps" else torch.float64).cumsum(-2)
    since, until = total.float().exp(), (total[..., -1:, :] - total).float().exp()
    carry = since[..., -1, :, None]
    same, scores = channel_pairs(torch.stack([k, q], dim=-2), k, total).unbind(-2)
    if begins is not None:  # with logs of 0, what is left of decays is the edges of documents
        edges = decays(logs.new_zeros(*begins.shape[:2], 1, begins.shape[2]), begins)
        same, scores = same * edges.between, scores * edges.between
        since, until, carry = (
            since * edges.since[..., None],
            until * edges.until[..., None],
            carry * edges.carry[..., None, None],
        )
    return same, scores, since, until, carry


def channel_pairs(later: Tensor, earlier: Tensor, total: Tensor) -> Tensor:
    """[.., Q, n, Q] the sum over channels of later_t earlier_s exp(total_t - total_s), s <= t.

    later: [.., Q, n, K]; earlier, total: [.., Q, K].
    By blocks that double: a decay from the first block of a pair to the second is one to the edge
    between them times one from there, and neither is above 1. A token's own is 1.
    """
    # [.., blocks, rows, n, columns]
    pairs = (later * earlier[..., None, :]).sum(-1)[..., None, :, None]
    while (half := pairs.shape[-1]) < total.shape[-2]:
        # [.., pairs of blocks, half, ..]
        (first, second), (_, queries), (keys, _) = (
            t.unflatten(3, (-1, 2, half)).unbind(4) for t in (total, later, earlier)
        )
        edge = first[..., -1:, :].detach()  # the answer does not depend on it
        queries = queries * (second - edge).float().exp()[..., None, :]
        keys = keys * (edge - first).float().exp()
        square = (queries.flatten(-3, -2) @ keys.mT).unflatten(-2, (half, -1))
        above, below = pairs.unflatten(3, (-1, 2)).unbind(4)
        pairs = torch.cat(
            [torch.cat([above, torch.zeros_like(square)], -1), torch.cat([square, below], -1)], -3
        )
    return pairs.squeeze(3)


class _UnitLowerInverse(torch.autograd.Function):
    """(1 + L)^-1 for L strictly lower triangular [..., Q, Q].

    Substitution by blocks that double: each block row is solved exactly from those above it. No
    series is summed, so no intermediate is larger than the answer.
    """

    @staticmethod
    def forward(ctx: Any, L: Tensor) -> Tensor:
        size = L.shape[-1]
        full = 1 << (size - 1).bit_length()
        inverse = (
            torch.eye(full, dtype=L.dtype, device=L.device)
            .expand(*L.shape[:-2], full, full)
            .clone()
        )
        padded = torch.nn.functional.pad(L, (0, full - size, 0, full - size)) if full > size else L
        half = 1
        while half < full:
            pairs = range(0, full, 2 * half)
            # the square below the diagonal of each pair of blocks:
            # -(lower right inverse) L (upper left inverse)
            first = torch.stack([inverse[..., i : i + half, i : i + half] for i in pairs], dim=-3)
            second = torch.stack(
                [inverse[..., i + half : i + 2 * half, i + half : i + 2 * half] for i in pairs],
                dim=-3,
            )
            below = torch.stack(
                [padded[..., i + half : i + 2 * half, i : i + half] for i in pairs], dim=-3
            )
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
