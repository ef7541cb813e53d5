"""linear: tokens through the weights of one or several layers that read the same x. `reference.py` defines it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

from amor.ops.backends import backend

_alone = ContextVar("alone", default=False)


@contextmanager
def each_alone() -> Iterator[None]:
    """Inside, a token's numbers do not depend on how many are computed with it, for at most a millisecond a product."""
    before = _alone.set(True)
    try:
        yield
    finally:
        _alone.reset(before)


def alone() -> bool:
    return _alone.get()


def linear(x: Tensor, weight: Tensor) -> Tensor:
    return linears(x, [[weight]])[0]


def linears(x: Tensor, groups: Sequence[Sequence[Tensor]]) -> tuple[Tensor, ...]:
    return backend("linear", x).linears(x, groups)
