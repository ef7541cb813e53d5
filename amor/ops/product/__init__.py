"""product: y = x W^T for the rows of a decode step, weights in any format of formats.py.

It takes as long as reading the weights once.
"""

from torch import Tensor

from amor.ops.backends import backend
from amor.ops.head.reference import HeadStats
from amor.ops.product.formats import FORMATS
from amor.ops.product.matrix import Matrix, pack
from amor.ops.spent import spend

ROWS = 8  # that one pass serves for little more time than one row: it is limited by memory

__all__ = ["FORMATS", "ROWS", "Matrix", "entropies", "pack", "probe", "product", "spend_product"]


def product(x: Tensor, matrix: Matrix, out: Tensor | None = None, add: bool = False) -> Tensor:
    """x [R, K] -> [R, N] in float32, without a gradient.

    out: where to write it, rows may be strided; add: += instead.
    """
    spend_product("products", x.shape[0], matrix)
    return backend("product", x).product(x, matrix, out, add)


def probe(x: Tensor, matrix: Matrix, logits: bool = False, last: int | None = None) -> HeadStats:
    """One pass over the head [V, K] for all rows of x [R, K].

    Gives entropy, logsumexp, the two best logits and the best token. logits: those too, of the
    `last` rows only where that is given.
    """
    spend_product("head", x.shape[0], matrix)
    return backend("product", x).probe(x, matrix, logits, last)


def entropies(logits: Tensor) -> Tensor:
    """[R] in nats, of logits [R, V]."""
    return backend("product", logits).entropies(logits)


def spend_product(what: str, rows: int, matrix: Matrix) -> None:
    """Count the product of `rows` rows with a matrix (amor/ops/spent.py)."""
    spend(what, 2 * rows * matrix.outputs * matrix.inner, matrix.nbytes)
