"""product: y = x W^T for the few rows of a decode step, weights in float32 or 8 bits, at the speed of reading them once."""

from torch import Tensor

from amor.ops.backends import backend
from amor.ops.product.matrix import KINDS, Matrix, Probe, pack
from amor.ops.spent import spend

ROWS = 8  # rows one pass over a matrix serves

__all__ = ["KINDS", "ROWS", "Matrix", "Probe", "pack", "probe", "product", "spend_product"]


def product(x: Tensor, matrix: Matrix, out: Tensor | None = None, add: bool = False) -> Tensor:
    """x [R, K] -> [R, N] in float32; into `out` (rows may lie apart), added to it where `add`. No gradient."""
    spend_product("products", x.shape[0], matrix)
    return backend("product", x).product(x, matrix, out, add)


def probe(x: Tensor, matrix: Matrix, logits: bool = False, last: int | None = None) -> Probe:
    """One pass over the head [V, K] for all rows of x [R, K]: entropy, logsumexp, the two best; logits where wanted.

    last: of so many last rows only.
    """
    spend_product("head", x.shape[0], matrix)
    return backend("product", x).probe(x, matrix, logits, last)


def spend_product(what: str, rows: int, matrix: Matrix) -> None:
    spend(what, 2 * rows * matrix.outputs * matrix.inner, matrix.nbytes * -(-rows // ROWS))
