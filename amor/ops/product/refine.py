"""A narrower bound on the entropy: the exact logits of the likeliest tokens, the 8-bit ones of the others.

The bound of bound.py holds for any approximation z' of the logits z with |z_v - z'_v| <= e_v. Here z' = z for the tokens
that the 8-bit head holds likeliest, so e_v is the rounding of a float32 sum for them, and |x| r_v + slack for the others.
Because errors count by their token's probability, little is left of it: a few thousand rows of W instead of all of them.
"""

import torch
from torch import Tensor

from amor.ops.product.bound import EVALUATION, HALF_STEP, ROUNDING
from amor.ops.product.matrix import Matrix
from amor.ops.spent import spend

LIKELY = 2048  # tokens looked at exactly: 6 MB of a head of width 768, a sixtieth of it


def refine(x: Tensor, exact: Matrix, copy: Matrix, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Entropies [R] in nats and their bounds, of x [R, K] with the 8-bit logits [R, V]."""
    assert copy.residuals is not None
    best = logits.topk(min(LIKELY, logits.shape[1]), dim=1).indices
    spend("head", 2 * best.numel() * exact.inner, 4 * best.numel() * exact.inner)
    known = torch.stack([exact.weight[ids] @ row for ids, row in zip(best, x.float(), strict=True)])
    z = logits.double().scatter(1, best, known.double())
    length = x.double().square().sum(1, keepdim=True).sqrt()
    moved = x.double().abs().amax(1, keepdim=True) * HALF_STEP * exact.inner**0.5
    rounding = copy.longest * 2 * (exact.inner + 16) * ROUNDING * length
    error = copy.residuals.double() * (length + moved) + copy.longest * moved + rounding  # [R, V]
    error = error.scatter(1, best, rounding.expand_as(best))
    logp = z.log_softmax(1)
    p = logp.exp()
    entropy = -(p * logp).sum(1)
    spread = (p * (logp + entropy[:, None]).square()).sum(1).sqrt()
    mean, most = (p * error.square()).sum(1).sqrt(), error.amax(1)
    growth = torch.where(most > 1e-6, torch.expm1(2 * most) / (2 * most), 1 + 2 * most)
    slack = mean * spread * growth + mean.square() * torch.exp(2 * most) / 2 + EVALUATION * (1 + spread + entropy)
    return entropy.float(), slack.float()
