"""A narrower bound on the entropy: the exact logits of the likeliest tokens, the 8-bit ones of the others.

The bound of bound.py holds for any approximation z' of the logits z with |z_v - z'_v| <= e_v. Here z' = z for the tokens
that the 8-bit head holds likeliest, so nothing was rounded away from their weights, and only the slack is left of e_v.
Because errors count by their token's probability, little is left of it: a few thousand rows of W instead of all of them.
"""

from torch import Tensor

from amor.ops.backends import backend
from amor.ops.product.bound import bound
from amor.ops.product.matrix import Matrix, check_logits
from amor.ops.spent import spend

LIKELY = 2048  # tokens looked at exactly: 6 MB of a head of width 768, a sixtieth of it


def refine(x: Tensor, exact: Matrix, copy: Matrix, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Entropies [R] in nats and their bounds, of x [R, K] with the 8-bit logits [R, V]."""
    check_logits(x, exact, logits)
    looked_at = len(x) * min(LIKELY, exact.outputs) * exact.inner
    spend("head", 2 * looked_at, 4 * looked_at)
    found = backend("product", x).refined(x, exact, copy, logits, LIKELY)
    return found.entropy, bound(x, copy, found)
