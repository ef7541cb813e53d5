"""The head packed for decode; every pass over its weights is counted."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from amor.ops.head.reference import HeadStats
from amor.ops.product import Matrix, pack, probe, product
from amor.ops.product.pages import use_huge_pages


@dataclass
class HeadPasses:
    """How often the head's weights were read, and for how many vectors."""

    passes: int = 0
    rows: int = 0

    def add(self, rows: int) -> None:
        """Count one pass for this many vectors."""
        self.passes += 1
        self.rows += rows


class Head:
    """W [V, D] packed in a weight format."""

    def __init__(self, weight: Tensor, weights: str):
        self.matrix: Matrix = pack(weight, weights)
        self.passes = HeadPasses()
        use_huge_pages(t for t in (self.matrix.weight, self.matrix.scales) if t is not None)

    def logits(self, x: Tensor) -> Tensor:
        """[R, V] of vectors x [R, D], without statistics."""
        self.passes.add(len(x))
        return product(x, self.matrix)

    def read(self, x: Tensor, last: int) -> HeadStats:
        """Statistics of all vectors x [R, D] in one pass, and logits of the `last` ones."""
        self.passes.add(len(x))
        return probe(x, self.matrix, logits=last > 0, last=last or None)
