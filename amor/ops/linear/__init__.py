"""linear: tokens through the weights of one or several layers that read the same x.

`reference.py` defines it.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

from amor.ops.backends import backend

_alone = ContextVar("alone", default=False)


@contextmanager
def each_alone() -> Iterator[None]:
    """Batch-invariant products inside a `with`: a token's bits do not depend on those beside it.

    Costs at most a millisecond per product.
    """
    before = _alone.set(True)
    try:
        yield
    finally:
        _alone.reset(before)


def alone() -> bool:
    """Whether products are batch-invariant now."""
    return _alone.get()


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [..., D] W^T for W [n, D] -> [..., n]."""
    return linears(x, [[weight]])[0]


def linears(x: Tensor, groups: Sequence[Sequence[Tensor]]) -> tuple[Tensor, ...]:
    """x [..., D] through groups of weights; as reference.py defines it."""
    return backend("linear", x).linears(x, groups)
