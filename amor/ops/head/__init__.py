"""head: negative log-likelihood, entropy and margin of the tied head, without T x V. `reference.py` says what it is."""

from torch import Tensor

from amor.ops.backends import backend
from amor.ops.head.reference import IGNORE, Reading

__all__ = ["IGNORE", "Reading", "loss", "read"]


def read(x: Tensor, weight: Tensor, targets: Tensor | None = None, entropy: bool = False, margin: bool = False) -> Reading:
    return backend("head", x).read(x, weight, targets, entropy, margin)


def loss(x: Tensor, weight: Tensor, targets: Tensor, share: Tensor) -> tuple[Tensor, Reading]:
    return backend("head", x).loss(x, weight, targets, share)
