"""Skinny products by torch: the definition, and what runs where there is no compiler.

y = x W^T. The probe reads all logits at once. Letters: R rows of x, W [N, K].
"""

from dataclasses import replace

import torch
from torch import Tensor

from amor.ops.product.bound import bound, errors
from amor.ops.product.matrix import Matrix, Probe


def product(x: Tensor, matrix: Matrix, out: Tensor | None = None, add: bool = False) -> Tensor:
    y = x.float() @ matrix.floats().T
    if out is None:
        return y
    return out.add_(y) if add else out.copy_(y)


def probe(x: Tensor, matrix: Matrix, logits: bool = False, last: int | None = None) -> Probe:
    z = product(x, matrix)
    # what the gain adds to the bound pays only where likely tokens are exact
    off = None if matrix.residuals is None else bound(x, replace(matrix, gain=torch.inf), z)
    return facts(z, matrix.residuals, off, z[-(last or len(z)) :] if logits else None)


def refined(x: Tensor, exact: Matrix, copy: Matrix, logits: Tensor, likely: int) -> tuple[Probe, int]:
    """The probe of 8-bit logits [R, V] whose likeliest tokens are looked at again with exact weights; how many were, in all."""
    assert copy.residuals is not None
    best = logits.topk(min(likely, logits.shape[1]), dim=1).indices
    known = torch.stack([exact.weight[ids] @ row for ids, row in zip(best, x.float(), strict=True)])
    z, residuals = logits.scatter(1, best, known), copy.residuals.expand_as(logits).scatter(1, best, 0.0)
    return facts(z, residuals, bound(x, copy, z, residuals)), best.numel()


def best(x: Tensor, exact: Matrix, copy: Matrix, logits: Tensor) -> tuple[Tensor, int]:
    """The token of the largest exact logit of each row, and how many rows of the exact head were looked at."""
    assert copy.residuals is not None
    tokens, looked_at = [], 0
    for row, z, length, slack in zip(x.float(), logits, *(e.float() for e in errors(x, copy)), strict=True):
        off = length * copy.residuals + slack
        among = (~(z + off < (z - off).max())).nonzero()[:, 0]  # not a number is never ruled out
        tokens.append(among[(exact.weight[among] @ row).argmax()])
        looked_at += len(among)
    return torch.stack(tokens), looked_at


def facts(z: Tensor, residuals: Tensor | None, off: Tensor | None, logits: Tensor | None = None) -> Probe:
    log_sum = z.logsumexp(1)
    logp = (z - log_sum[:, None]).double()
    p = logp.exp()
    entropy = -(p * logp).sum(1)
    spread = (p * (logp + entropy[:, None]).square()).sum(1).sqrt()
    values, ids = z.topk(2, dim=1)
    nothing = torch.zeros_like(entropy)
    rest = nothing if residuals is None else (p * residuals.double().square()).sum(1).sqrt()
    told = entropy, nothing if off is None else off, log_sum, *values.T, spread, rest
    return Probe(torch.stack([t.float() for t in told]), ids[:, 0], logits)
