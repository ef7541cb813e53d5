"""The tied head ready for decode; every pass over it is counted."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from amor.ops.head.reference import HeadStats
from amor.ops.product import Matrix, pack, probe, product
from amor.ops.product.pages import use_huge_pages


@dataclass
class Passes:
    """Times a head's weights were read, and for how many vectors."""

    exact: int = 0
    rows: int = 0


class Head:
    """W [V, D] packed in a format."""

    def __init__(self, weight: Tensor, weights: str):
        self.matrix: Matrix = pack(weight, weights)
        self.passes = Passes()
        use_huge_pages(t for t in (self.matrix.weight, self.matrix.scales) if t is not None)

    def logits(self, x: Tensor) -> Tensor:
        """[R, V], and nothing else of them."""
        self._count(len(x))
        return product(x, self.matrix)

    def read(self, x: Tensor, last: int) -> HeadStats:
        """One pass for all rows of x [R, D]; logits of the `last` ones."""
        self._count(len(x))
        return probe(x, self.matrix, logits=last > 0, last=last or None)

    def _count(self, rows: int) -> None:
        self.passes.exact += 1
        self.passes.rows += rows
