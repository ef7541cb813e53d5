"""Skinny products by torch: the definition, and what runs where there is no compiler.

y = x W^T, x rounded where the format rounds it. The probe reads all logits at once. Letters: R rows of x, W [N, K].
"""

from dataclasses import replace

import torch
from torch import Tensor

from amor.ops.head.reference import HeadStats
from amor.ops.product.bound import bound, errors
from amor.ops.product.matrix import Matrix


def product(x: Tensor, matrix: Matrix, out: Tensor | None = None, add: bool = False) -> Tensor:
    y = matrix.format.rounded(x) @ matrix.floats().T
    if out is None:
        return y
    return out.add_(y) if add else out.copy_(y)


def probe(x: Tensor, matrix: Matrix, logits: bool = False, last: int | None = None) -> HeadStats:
    z = product(x, matrix)
    off = None
    if matrix.lost is not None:  # what the gain adds to the bound pays only where likely tokens are exact
        off = bound(x, replace(matrix, lost=replace(matrix.lost, gain=torch.inf)), z)
    return stats(z, off, z[-(last or len(z)) :] if logits else None)


def entropies(logits: Tensor) -> Tensor:
    logp = logits.double().log_softmax(-1)
    return -(logp.exp() * logp).sum(-1).float()


def refined(x: Tensor, exact: Matrix, copy: Matrix, logits: Tensor, likely: int) -> tuple[HeadStats, int]:
    """The probe of 8-bit logits [R, V] whose likeliest tokens are looked at again with exact weights; how many were, in all."""
    assert copy.lost is not None
    best = logits.topk(min(likely, logits.shape[1]), dim=1).indices
    known = torch.stack([exact.weight[ids] @ row for ids, row in zip(best, x.float(), strict=True)])
    z, residuals = logits.scatter(1, best, known), copy.lost.residuals.expand_as(logits).scatter(1, best, 0.0)
    return stats(z, bound(x, copy, z, residuals)), best.numel()


def best(x: Tensor, exact: Matrix, copy: Matrix, logits: Tensor) -> tuple[Tensor, int]:
    """The token of the largest exact logit of each row, and how many rows of the exact head were looked at."""
    assert copy.lost is not None
    tokens, looked_at = [], 0
    for row, z, length, slack in zip(x.float(), logits, *(e.float() for e in errors(x, copy)), strict=True):
        off = length * copy.lost.residuals + slack
        among = (~(z + off < (z - off).max())).nonzero()[:, 0]  # not a number is never ruled out
        tokens.append(among[(exact.weight[among] @ row).argmax()])
        looked_at += len(among)
    return torch.stack(tokens), looked_at


def stats(z: Tensor, off: Tensor | None, logits: Tensor | None = None) -> HeadStats:
    values, ids = z.topk(2, dim=1)
    return HeadStats(entropy=entropies(z), bound=off, logsumexp=z.logsumexp(1), topk=(values, ids[:, :1]), logits=logits)
