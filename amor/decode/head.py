"""The tied head ready for decode, its 8-bit copy, and what is expected of the next token: whether asking the copy pays."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from amor.ops.product import Matrix, pack, probe
from amor.ops.product.pages import settle

MEMORY = 0.98  # a token ago counts this much of the present one in what is expected
CLEARLY = 0.05  # exact passes the 8-bit copy has to save: what goes on around its pass is not in the sum


@dataclass
class Passes:
    """Times the head's weights were read, and for how many vectors."""

    exact: int = 0
    rows: int = 0
    cheap: int = 0  # over the 8-bit copy
    cheap_rows: int = 0


class Head:
    """The tied head ready for few rows, and its 8-bit copy where cheap probes are wanted."""

    def __init__(self, weight: Tensor, kind: str, cheap: bool):
        self.matrix: Matrix = pack(weight, kind)
        # an 8-bit head needs no cheaper copy of itself
        self.copy: Matrix | None = pack(weight, "int8", gain=True) if cheap and kind == "float32" else None
        self.passes = Passes()
        settle(t for m in self.matrices() for t in (m.weight, m.scales) if t is not None)
        self.copy_cost = 1.0 if self.copy is None else _relative(self.matrix, self.copy)
        # of late, shares: tokens at which some block fired; firings that another one followed; and blocks a token that the 8-bit
        # head could not decide
        self.fires = self.again = self.doubted = 0.0

    def expect(self, fires: Sequence[Sequence[bool]], rows: int, doubts: int) -> None:
        """Take in what one more token of some rows did: which of them fired, block by block."""
        self.fires = _follow(self.fires, sum(map(any, zip(*fires, strict=True))) / rows)
        self.doubted = _follow(self.doubted, doubts / rows)
        for row in zip(*fires, strict=True):
            for index, fired in enumerate(row[:-1]):
                if fired:
                    self.again = _follow(self.again, any(row[index + 1 :]))

    def copy_pays(self, fires: float, best: bool = False) -> bool:
        """Whether blocks that will fire with this probability are better asked over the 8-bit copy.

        A pass over the exact head serves the output too, unless one of them fires; a pass over the copy has to be followed by
        that of the output. Where the best token is all that is wanted of the output, its pass is over the copy too. A doubt
        costs an exact pass, which serves the output as well if nothing fires after it.
        """
        if self.copy is None:
            return False
        if best:
            return self.copy_cost + self.doubted + CLEARLY < 1
        return self.copy_cost + self.doubted * fires + CLEARLY < fires

    def matrices(self) -> list[Matrix]:
        return [self.matrix] if self.copy is None else [self.matrix, self.copy]

    @property
    def nbytes(self) -> int:
        return sum(m.nbytes for m in self.matrices())


def _follow(average: float, new: float) -> float:
    return average + (1 - MEMORY) * (new - average)


def _relative(matrix: Matrix, copy: Matrix) -> float:
    """Seconds of a pass over the copy for three rows, in passes over the matrix for one.

    It differs from machine to machine: where three rows are limited by arithmetic, the copy gains less than its bytes say.
    """
    x = torch.ones(3, matrix.inner, device=matrix.weight.device)
    sides = [lambda: probe(x[:1], matrix, logits=True), lambda: probe(x, copy, logits=True)]
    best = [float("inf")] * 2
    for _ in range(6):
        for side, work in enumerate(sides):
            began = time.perf_counter()
            work()
            best[side] = min(best[side], time.perf_counter() - began)
    return best[1] / best[0]
