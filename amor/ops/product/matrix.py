"""A weight matrix made ready for skinny products, in one of the formats of formats.py.

What rounding took away can be kept as one length a row (`Lost`), which bounds the error of every product:
|x w' - x w| <= |x| |w' - w|.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from amor.ops.product.formats import TILE, Format, format_of

SLICE = 256  # tiles packed at a time: their copies on the way would be larger than what is made


@dataclass(frozen=True)
class Lost:
    """What rounding took from the rows of a matrix."""

    residuals: Tensor  # [outputs] length of what was taken from a row
    longest: float  # length of the longest row of W
    worst: float  # the largest of the residuals
    gain: float  # what many rows of it can add up to: |R u| <= gain |u|, R the residuals at length 1


@dataclass(frozen=True)
class Matrix:
    """W [outputs, inner]."""

    outputs: int
    inner: int
    format: Format
    weight: Tensor
    scales: Tensor | None = None
    lost: Lost | None = None  # where a bound is wanted

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + (0 if self.scales is None else self.scales.nbytes)

    def floats(self) -> Tensor:
        """The matrix these weights stand for, in float32."""
        return self.format.floats(self.weight, self.scales)[: self.outputs, : self.inner]


@torch.no_grad()
def pack(weight: Tensor, name: str = "float32", bounded: bool = False) -> Matrix:
    """Make a matrix ready. float32 shares the tensor's memory where it can; any other format is a new one.

    bounded: keep what rounding took away; that takes as long as outputs * inner^2 multiplications.
    """
    form, weight = format_of(name), weight.detach()
    outputs, inner = weight.shape
    losing = _Losing(outputs, inner) if bounded else None
    weights: list[Tensor] = []
    scales: list[Tensor] = []
    for rows in weight.split(SLICE * TILE) if form.tiled else [weight]:
        stored, scale = form.pack(F.pad(rows.float(), (0, 0, 0, -len(rows) % TILE)) if form.tiled else rows.float())
        weights.append(stored)
        scales += [] if scale is None else [scale]
        if losing is not None:
            losing.take(rows.double(), form.floats(stored, scale)[: len(rows), :inner].double())
    found = Matrix(outputs, inner, form, *(_joined(parts) for parts in (weights, scales)))  # type: ignore[arg-type]
    return found if losing is None else replace(found, lost=losing.lost())


def _joined(parts: list[Tensor]) -> Tensor | None:
    return parts[0] if len(parts) == 1 else torch.cat(parts) if parts else None


SUMMED = 256  # rows in one float32 sum


class _Losing:
    """Sums of what rounding takes from rows, slice by slice."""

    def __init__(self, outputs: int, inner: int):
        self.outputs = outputs
        self.residuals: list[Tensor] = []
        self.longest = 0.0
        self.squares = torch.zeros(inner, inner, dtype=torch.float64)

    def take(self, rows: Tensor, stored: Tensor) -> None:
        left = rows - stored
        self.residuals.append(left.square().sum(1).sqrt().float())
        self.longest = max(self.longest, float(rows.square().sum(1).sqrt().max()))
        unit = (left / left.norm(dim=1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)).float()
        for part in unit.split(SUMMED):
            self.squares += (part.T @ part).double().cpu()

    def lost(self) -> Lost:
        residuals = torch.cat(self.residuals)
        return Lost(residuals, self.longest, float(residuals.max()), self._gain())

    def _gain(self) -> float:
        """The largest |R u| / |u|: root of the largest eigenvalue, with all that rounding can have taken from it."""
        if not bool(self.squares.isfinite().all()):
            return torch.inf
        rounding = (SUMMED + 8) * 2.0**-24 * self.outputs  # of sums of SUMMED products, whose sizes add up to at most `outputs`
        return (float(torch.linalg.eigvalsh(self.squares)[-1]) + rounding) ** 0.5
