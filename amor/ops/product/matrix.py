"""A weight matrix made ready for skinny products, in one of the formats of formats.py."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from amor.ops.product.formats import TILE, Format, format_of

SLICE = 256  # tiles packed at a time, to limit the memory of intermediate copies


@dataclass(frozen=True)
class Matrix:
    """W [outputs, inner] as it is stored."""

    outputs: int
    inner: int
    format: Format
    weight: Tensor  # laid out by the format
    scales: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of weights and scales."""
        return self.weight.nbytes + (0 if self.scales is None else self.scales.nbytes)

    def floats(self) -> Tensor:
        """The matrix these weights stand for, in float32."""
        return self.format.floats(self.weight, self.scales)[: self.outputs, : self.inner]


@torch.no_grad()
def pack(weight: Tensor, name: str = "float32") -> Matrix:
    """W [outputs, inner] in a format. float32 shares the tensor's memory where it can."""
    form, weight = format_of(name), weight.detach()
    outputs, inner = weight.shape
    weights: list[Tensor] = []
    scales: list[Tensor] = []
    for rows in weight.split(SLICE * TILE) if form.tiled else [weight]:
        stored, scale = form.pack(
            F.pad(rows.float(), (0, 0, 0, -len(rows) % TILE)) if form.tiled else rows.float()
        )
        weights.append(stored)
        scales += [] if scale is None else [scale]
    return Matrix(outputs, inner, form, _joined(weights), _joined(scales) if scales else None)


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
