"""head: statistics of the next-token distribution of hidden vectors, without T x V logits.

Likelihood, entropy, margin and best tokens; `reference.py` defines them. torch's own
F.linear_cross_entropy gives the loss alone, and on two cores its chunks take seven times as long as
the dense loss (docs/log.md), so it is not one of the backends.
"""

from torch import Tensor

from amor.ops.backends import backend
from amor.ops.head.reference import IGNORE, HeadStats

__all__ = ["IGNORE", "HeadStats", "loss", "read"]


def read(
    x: Tensor,
    weight: Tensor,
    targets: Tensor | None = None,
    entropy: bool = False,
    margin: bool = False,
    topk: int = 0,
) -> HeadStats:
    """As reference.py defines it."""
    return backend("head", x).read(x, weight, targets, entropy, margin, topk)


def loss(
    x: Tensor, weight: Tensor, targets: Tensor, target_weight: Tensor
) -> tuple[Tensor, HeadStats]:
    """As reference.py defines it."""
    return backend("head", x).loss(x, weight, targets, target_weight)
