"""How weights are stored for decode, as rows of a table.

To add a format: a row here, a struct of the same tag in ops/native/skinny.h, a parameter in
tests/test_ops_product.py (which takes every row of the table). With x' and w' what x and a row w of
W are rounded to, every format keeps a product within

    |x' w' - x w| <= |x'| |w' - w| + |x' - x| |w|, plus the rounding of float32 sums.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from amor.errors import AmorError, nearest

Stored = tuple[Tensor, Tensor | None]  # weights and scales as they lie in memory
TILE = 16  # rows of W packed together, a multiple of every format's own tile; as in skinny.h


@dataclass(frozen=True)
class Format:
    """One way of storing weights."""

    name: str
    tag: int  # its number in skinny.h
    bits: float  # per weight, scales included
    pack: Callable[[Tensor], Stored]  # W [n, K] in float32, n a multiple of TILE where tiled
    # stored -> the W it stands for, [n', K'] with n' >= n, K' >= K
    floats: Callable[[Tensor, Tensor | None], Tensor]
    tiled: bool = True  # rows are laid out TILE together; False: W stays where it is
    group: int = 1  # weights that share a scale
    levels: int = 0  # x is rounded to whole numbers of at most this size; 0: not at all
    steps: int = 0  # numbers of x that share their step; 0: a whole row
    # of a model's logits, relative to the largest, against a model that computes by `rounded` and
    # `floats`: a number of x in the middle between two steps may be rounded either way, and layers
    # of random weights amplify it (measured: 0.003 for int8, 0.05 for int4)
    tolerance: float = 1e-4

    def rounded(self, x: Tensor) -> Tensor:
        """What x [R, K] is rounded to, in float32."""
        if not self.levels:
            return x.float()
        pieces = self._pieces(x.float())
        largest = pieces.abs().amax(2, keepdim=True)
        whole = (pieces * torch.where(largest > 0, self.levels / largest, 0.0)).round()
        return (whole * (largest / self.levels)).flatten(1)[:, : x.shape[1]]

    def _pieces(self, x: Tensor) -> Tensor:
        """[R, pieces, steps] numbers that share a step; zeros behind the end."""
        steps = self.steps or x.shape[1]
        return F.pad(x, (0, -x.shape[1] % steps)).unflatten(1, (-1, steps))


def _as_it_is(weight: Tensor) -> Stored:
    return weight.contiguous(), None


def _halves(weight: Tensor) -> Stored:
    """Tiles of 16 rows: [rows / 16, K, 16]."""
    return weight.half().unflatten(0, (-1, 16)).transpose(1, 2).contiguous(), None


def _from_halves(weight: Tensor, scales: Tensor | None) -> Tensor:
    return weight.transpose(1, 2).flatten(0, 1).float()


def _grouped(weight: Tensor, group: int) -> Tensor:
    """[n, groups, group], zeros behind the end of a row."""
    return F.pad(weight, (0, -weight.shape[1] % group)).unflatten(1, (-1, group))


TINY = torch.finfo(torch.float32).tiny


def _bytes(weight: Tensor) -> Stored:
    """Whole numbers from -127 to 127 in tiles of 16 rows.

    Rows i and i + 8 of a tile stand beside each other, the first plus 128.
    """
    w = _grouped(weight, 64)
    scale = w.abs().amax(2) / 127
    whole = (
        (w / scale[..., None].clamp(min=TINY)).round().clamp(-127, 127).flatten(1).to(torch.int8)
    )
    pairs = whole.view(-1, 2, 8, whole.shape[1] // 2, 2).permute(0, 3, 2, 4, 1).contiguous()
    pairs[..., 0] ^= -128
    return pairs.flatten(2), scale.unflatten(0, (-1, 16)).transpose(1, 2).contiguous()


def _from_bytes(weight: Tensor, scales: Tensor | None) -> Tensor:
    assert scales is not None
    pairs = weight.unflatten(2, (8, 2, 2)).clone()
    pairs[..., 0] ^= -128
    whole = pairs.permute(0, 4, 2, 1, 3).flatten(0, 2).flatten(1)
    return (
        whole.unflatten(1, (-1, 64)).float() * scales.transpose(1, 2).flatten(0, 1)[..., None]
    ).flatten(1)


def _nibbles(weight: Tensor) -> Stored:
    """Whole numbers from 0 to 15, less 8, in tiles of 8 rows as skinny.h reads them.

    The number of the largest size in a group is -8 steps.
    """
    w = _grouped(weight, 32)
    furthest = w.gather(2, w.abs().argmax(2, keepdim=True))[..., 0]
    scale = _best_scale(w, furthest / -8)
    step = scale.float()[..., None]
    whole = (
        torch.where(step == 0, 8.0, w / torch.where(step == 0, 1.0, step) + 8)
        .round()
        .clamp(0, 15)
        .nan_to_num(8)
        .to(torch.uint8)
    )
    # [tiles, 8 rows, groups, half, 4 j, 4 i] -> [tiles, groups, j, row, i], both halves in a byte
    laid = whole.unflatten(0, (-1, 8)).unflatten(3, (2, 4, 4)).permute(0, 2, 4, 1, 5, 3)
    bytes_ = laid[..., 0] | (laid[..., 1] << 4)
    return bytes_.flatten(2).contiguous(), scale.unflatten(0, (-1, 8)).transpose(1, 2).contiguous()


def _best_scale(w: Tensor, scale: Tensor) -> Tensor:
    """The step with the least squared error of each group, of a few a little below `scale`."""
    best, least = scale.half(), torch.full_like(scale, torch.inf)
    for shrink in (1.0, 0.95, 0.9, 0.85):
        step = (scale * shrink).half()
        used = torch.where(step == 0, 1.0, step.float())[..., None]
        lost = (((w / used).round().clamp(-8, 7) * used - w).square()).sum(2)
        better = lost < least
        best, least = torch.where(better, step, best), torch.where(better, lost, least)
    return torch.where(w.isfinite().all(2), best, torch.nan)


def _from_nibbles(weight: Tensor, scales: Tensor | None) -> Tensor:
    assert scales is not None
    halves = torch.stack([weight & 15, weight >> 4], dim=-1)
    halves = halves.unflatten(2, (4, 8, 4))  # [tiles, groups, j, row, i, half]
    whole = (
        halves.permute(0, 3, 1, 5, 2, 4).flatten(3).flatten(0, 1).float() - 8
    )  # [rows, groups, 32]
    return (whole * scales.transpose(1, 2).flatten(0, 1)[..., None].float()).flatten(1)


def _as_it_was(weight: Tensor, scales: Tensor | None) -> Tensor:
    return weight


FORMATS: dict[str, Format] = {
    one.name: one
    for one in (
        Format("float32", 0, 32, _as_it_is, _as_it_was, tiled=False),
        Format("float16", 1, 16, _halves, _from_halves),
        Format("int8", 2, 8.5, _bytes, _from_bytes, group=64, levels=32767, tolerance=0.01),
        Format(
            "int4", 3, 4.5, _nibbles, _from_nibbles, group=32, levels=127, steps=32, tolerance=0.1
        ),
    )
}


def format_of(name: str) -> Format:
    """The format of a name, or an error with the nearest one."""
    if name not in FORMATS:
        raise AmorError(f"weights: no {name!r}; {nearest(name, FORMATS)}")
    return FORMATS[name]
