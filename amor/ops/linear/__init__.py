"""linear: tokens through the weights of one or several layers that read the same x. `reference.py` defines it."""

from collections.abc import Sequence

from torch import Tensor

from amor.ops.backends import backend


def linear(x: Tensor, weight: Tensor) -> Tensor:
    return linears(x, [[weight]])[0]


def linears(x: Tensor, groups: Sequence[Sequence[Tensor]]) -> tuple[Tensor, ...]:
    return backend("linear", x).linears(x, groups)
