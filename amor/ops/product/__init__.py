"""product: y = x W^T for the rows of a decode step, weights in any format of formats.py, at the speed of reading them once."""

from torch import Tensor

from amor.ops.backends import backend
from amor.ops.head.reference import HeadStats
from amor.ops.product.formats import FORMATS
from amor.ops.product.matrix import Matrix, pack
from amor.ops.spent import spend

ROWS = 8  # rows that one pass over a matrix serves at little more than the price of one: it waits for memory

__all__ = ["FORMATS", "ROWS", "Matrix", "entropies", "pack", "probe", "product", "spend_product"]


def product(x: Tensor, matrix: Matrix, out: Tensor | None = None, add: bool = False) -> Tensor:
    """x [R, K] -> [R, N] in float32; into `out` (rows may lie apart), added to it where `add`. No gradient."""
    spend_product("products", x.shape[0], matrix)
    return backend("product", x).product(x, matrix, out, add)


def probe(x: Tensor, matrix: Matrix, logits: bool = False, last: int | None = None) -> HeadStats:
    """One pass over the head [V, K] for all rows of x [R, K]: entropy, logsumexp, the two best logits and the best token.

    logits: they too, of so many `last` rows only where given.
    """
    spend_product("head", x.shape[0], matrix)
    return backend("product", x).probe(x, matrix, logits, last)


def entropies(logits: Tensor) -> Tensor:
    """[R] in nats, of logits [R, V] that are there already."""
    return backend("product", logits).entropies(logits)


def spend_product(what: str, rows: int, matrix: Matrix) -> None:
    spend(what, 2 * rows * matrix.outputs * matrix.inner, matrix.nbytes)
