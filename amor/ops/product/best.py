"""The token of the largest exact logit, from 8-bit logits and a few rows of the exact head.

An 8-bit logit is off by at most e_v (bound.py), so the best token is among those that could still be above the largest
lower end: z8_v + e_v >= max_u (z8_u - e_u). Their exact logits decide. They are a handful, unless the model hardly prefers any.
"""

from torch import Tensor

from amor.ops.backends import backend
from amor.ops.product import check_logits
from amor.ops.product.matrix import Matrix
from amor.ops.spent import spend


def best(x: Tensor, exact: Matrix, copy: Matrix, logits: Tensor) -> Tensor:
    """[R] the argmax of x [R, K] over the exact head, given the logits [R, V] of its 8-bit copy."""
    check_logits(x, exact, logits)
    tokens, looked_at = backend("product", x).best(x, exact, copy, logits)
    spend("head", 2 * looked_at * exact.inner, 4 * looked_at * exact.inner)
    return tokens
