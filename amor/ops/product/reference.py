"""Skinny products by torch: the definition, and what runs where there is no compiler.

y = x W^T, x rounded where the format rounds it. The probe reads all logits at once. Letters: R rows
of x, W [N, K].
"""

from torch import Tensor

from amor.ops.head.reference import HeadStats
from amor.ops.product.matrix import Matrix


def product(x: Tensor, matrix: Matrix, out: Tensor | None = None, add: bool = False) -> Tensor:
    """As amor.ops.product.product."""
    y = matrix.format.rounded(x) @ matrix.floats().T
    if out is None:
        return y
    return out.add_(y) if add else out.copy_(y)


def probe(x: Tensor, matrix: Matrix, logits: bool = False, last: int | None = None) -> HeadStats:
    """As amor.ops.product.probe."""
    z = product(x, matrix)
    values, ids = z.topk(2, dim=1)
    kept = z[-(last or len(z)) :] if logits else None
    return HeadStats(
        entropy=entropies(z), logsumexp=z.logsumexp(1), topk=(values, ids[:, :1]), logits=kept
    )


def entropies(logits: Tensor) -> Tensor:
    """[R] in nats, of logits [R, V]; summed in float64."""
    logp = logits.double().log_softmax(-1)
    return -(logp.exp() * logp).sum(-1).float()
