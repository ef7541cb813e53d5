"""A narrower bound on the entropy: the exact logits of the likeliest tokens, the 8-bit ones of the others.

The bounds of bound.py hold for any approximation z' of the logits z with |z_v - z'_v| <= e_v. Here z' = z for the tokens
that the 8-bit head holds likeliest, so nothing was rounded away from their weights. What is left is the error of many tokens
of little probability each, which cannot all err alike: a thousand rows of W instead of all of them.
"""

from torch import Tensor

from amor.ops.backends import backend
from amor.ops.head.reference import HeadStats
from amor.ops.product import check_logits
from amor.ops.product.matrix import Matrix
from amor.ops.spent import spend

SHARE, LEAST = 256, 32  # of the vocabulary one token in so many is looked at exactly, and no fewer than so many


def refine(x: Tensor, exact: Matrix, copy: Matrix, logits: Tensor) -> HeadStats:
    """What is known of x [R, K] with the 8-bit logits [R, V] when the likeliest tokens are looked at again."""
    check_logits(x, exact, logits)
    found, looked_at = backend("product", x).refined(x, exact, copy, logits, max(LEAST, exact.outputs // SHARE))
    spend("head", 2 * looked_at * exact.inner, 4 * looked_at * exact.inner)
    return found
