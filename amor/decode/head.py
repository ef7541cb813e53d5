"""The tied head ready for decode, and its 8-bit copy for greedy text; every reading is counted."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from amor.ops.head.reference import HeadStats
from amor.ops.product import Matrix, pack, probe, product
from amor.ops.product.best import best
from amor.ops.product.pages import use_huge_pages
from amor.ops.product.refine import refine


@dataclass
class Passes:
    """Times a head's weights were read, and for how many vectors."""

    exact: int = 0
    rows: int = 0
    cheap: int = 0  # over the 8-bit copy
    cheap_rows: int = 0


class Head:
    """W [V, D] packed in a format; `copied`: also in 8 bits with a bound on what was lost, where the format is exact."""

    def __init__(self, weight: Tensor, weights: str, copied: bool):
        self.matrix: Matrix = pack(weight, weights)
        self.copy: Matrix | None = pack(weight, "int8", bounded=True) if copied and weights == "float32" else None
        self.passes = Passes()
        use_huge_pages(t for m in self.matrices() for t in (m.weight, m.scales) if t is not None)

    def matrices(self) -> list[Matrix]:
        return [self.matrix] if self.copy is None else [self.matrix, self.copy]

    def logits(self, x: Tensor) -> Tensor:
        """[R, V], and nothing else of them."""
        self._count(len(x))
        return product(x, self.matrix)

    def read(self, x: Tensor, last: int) -> HeadStats:
        """One pass for all rows of x [R, D]; logits of the `last` ones."""
        self._count(len(x))
        return probe(x, self.matrix, logits=last > 0, last=last or None)

    def glance(self, x: Tensor) -> HeadStats:
        """One pass over the 8-bit copy: logits, and entropies with a bound on their error."""
        assert self.copy is not None
        self.passes.cheap += 1
        self.passes.cheap_rows += len(x)
        return probe(x, self.copy, logits=True)

    def refine(self, x: Tensor, logits: Tensor) -> HeadStats:
        """A narrower bound, from the exact logits of the likeliest tokens."""
        assert self.copy is not None
        return refine(x, self.matrix, self.copy, logits)

    def best(self, x: Tensor, logits: Tensor) -> Tensor:
        """[R] the best token of the exact head, given the copy's logits."""
        assert self.copy is not None
        return best(x, self.matrix, self.copy, logits)

    def _count(self, rows: int) -> None:
        self.passes.exact += 1
        self.passes.rows += rows
