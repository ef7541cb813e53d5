"""Skinny products by torch: the definition, and what runs where there is no compiler.

y = x W^T. The probe reads all logits at once. Letters: R rows of x, W [N, K].
"""

from torch import Tensor

from amor.ops.product.matrix import Matrix, Probe


def product(x: Tensor, matrix: Matrix, out: Tensor | None = None, add: bool = False) -> Tensor:
    y = x.float() @ matrix.floats().T
    if out is None:
        return y
    return out.add_(y) if add else out.copy_(y)


def probe(x: Tensor, matrix: Matrix, logits: bool = False) -> Probe:
    z = product(x, matrix)
    log_sum = z.logsumexp(1)
    logp = (z - log_sum[:, None]).double()
    p = logp.exp()
    entropy = -(p * logp).sum(1)
    spread = (p * (logp + entropy[:, None]).square()).sum(1).sqrt()
    values, ids = z.topk(2, dim=1)
    rest = None if matrix.residuals is None else (p * matrix.residuals.double().square()).sum(1).sqrt().float()
    return Probe(entropy.float(), log_sum, values, ids[:, 0], spread.float(), rest, z if logits else None)
