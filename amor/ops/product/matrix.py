"""A weight matrix made ready for skinny products: float32 as it is, or 8 bits a weight with a scale a group of 64.

An 8-bit weight is a whole number from -127 to 127 times its group's scale. What rounding took away is kept as one length
a row (`residuals`), which bounds the error of every product: |x w8 - x w| <= |x| |w8 - w|.
"""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from amor.errors import AmorError, nearest

GROUP, TILE = 64, 16  # weights of a row that share a scale, and rows that lie together; skinny.h has the same numbers
SLICE = 256  # tiles packed at a time
KINDS = ("float32", "int8")


@dataclass(frozen=True)
class Matrix:
    """W [outputs, inner]."""

    outputs: int
    inner: int
    weight: Tensor  # float32 [outputs, inner], or int8 [tiles, groups * GROUP / 2, 32] as `tiled` lays them
    scales: Tensor | None = None  # [tiles, groups, TILE]
    residuals: Tensor | None = None  # [outputs] length of what rounding took from a row
    longest: float = 0.0  # length of the longest row of W
    worst: float = 0.0  # the largest of the residuals
    gain: float = torch.inf  # what many rows of it can add up to: |R u| <= gain |u|, R the residuals at length 1

    @property
    def kind(self) -> str:
        return "float32" if self.scales is None else "int8"

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + (0 if self.scales is None else self.scales.nbytes)

    def floats(self) -> Tensor:
        """The matrix these weights stand for, in float32."""
        if self.scales is None:
            return self.weight
        whole = untiled(self.weight).unflatten(1, (-1, GROUP)).float() * self.scales.transpose(1, 2).flatten(0, 1)[..., None]
        return whole.flatten(1)[: self.outputs, : self.inner]


TOLD = ("entropy", "off", "logsumexp", "best", "second", "spread", "residual")


@dataclass(frozen=True)
class Probe:
    """What one pass over the head found of a few rows."""

    told: Tensor  # [7, R] as in TOLD
    token: Tensor  # [R] the token of the largest logit
    logits: Tensor | None = None  # [R, V] where asked for

    @property
    def entropy(self) -> Tensor:
        """[R] in nats."""
        return self.told[0]

    @property
    def off(self) -> Tensor:
        """[R] nats by which the exact entropy may differ: 0, or of 8-bit weights as bound.py says."""
        return self.told[1]

    @property
    def logsumexp(self) -> Tensor:
        return self.told[2]

    @property
    def best(self) -> Tensor:
        """[R, 2] the two largest logits."""
        return self.told[3:5].T

    @property
    def spread(self) -> Tensor:
        """[R] standard deviation of the logit under the softmax."""
        return self.told[5]

    @property
    def residual(self) -> Tensor:
        """[R] 8-bit weights: root of the mean square of `residuals` under the softmax, else 0."""
        return self.told[6]

    @property
    def margin(self) -> Tensor:
        """Probability of the best token minus that of the second."""
        p = (self.best - self.logsumexp[:, None]).exp()
        return p[:, 0] - p[:, 1]


def check_logits(x: Tensor, head: Matrix, logits: Tensor) -> None:
    if logits.shape != (len(x), head.outputs) or x.shape[1] != head.inner:
        raise AmorError(f"logits {list(logits.shape)} are not of x {list(x.shape)} and a head [{head.outputs}, {head.inner}]")


def tiled(whole: Tensor) -> Tensor:
    """Weights [tiles * TILE, K] as they are read fastest: rows i and i + 8 of a tile beside each other, the first plus 128."""
    pairs = whole.view(-1, 2, TILE // 2, whole.shape[1] // 2, 2).permute(0, 3, 2, 4, 1).contiguous()
    pairs[..., 0] ^= -128
    return pairs.flatten(2)


def untiled(weight: Tensor) -> Tensor:
    pairs = weight.unflatten(2, (TILE // 2, 2, 2)).clone()
    pairs[..., 0] ^= -128
    return pairs.permute(0, 4, 2, 1, 3).flatten(0, 2).flatten(1)


@torch.no_grad()
def pack(weight: Tensor, kind: str = "float32", gain: bool = False) -> Matrix:
    """Make a matrix ready. float32 shares the tensor's memory where it can; int8 is a new one of a quarter of the size.

    gain: find what bounds the sum of many rows' errors too; it takes as long as outputs * inner^2 multiplications.
    """
    if kind not in KINDS:
        raise AmorError(f"weights: no {kind!r}; {nearest(kind, KINDS)}")
    weight = weight.detach()
    outputs, inner = weight.shape
    if kind == "float32":
        return Matrix(outputs, inner, weight.float().contiguous())
    groups, tiles = -(-inner // GROUP), -(-outputs // TILE)
    whole = torch.empty(tiles, groups * GROUP // 2, 2 * TILE, dtype=torch.int8, device=weight.device)
    scales = torch.empty(tiles, groups, TILE, device=weight.device)
    residuals, lengths = (torch.empty(tiles * TILE, device=weight.device) for _ in range(2))
    squares = torch.zeros(groups * GROUP, groups * GROUP, dtype=torch.float64, device=weight.device)
    for start in range(0, tiles, SLICE):  # a slice at a time: the float copies would be larger than what is made
        part, rows = slice(start, start + SLICE), slice(start * TILE, (start + SLICE) * TILE)
        missing = len(residuals[rows]) - len(weight[rows])
        w = F.pad(weight[rows].float(), (0, groups * GROUP - inner, 0, missing)).unflatten(1, (groups, GROUP))
        scale = w.abs().amax(2) / 127
        rounded = (w / scale[..., None].clamp(min=torch.finfo(torch.float32).tiny)).round().clamp(-127, 127)
        whole[part] = tiled(rounded.flatten(1).to(torch.int8))
        scales[part] = scale.unflatten(0, (-1, TILE)).transpose(1, 2)
        left = w.double() - rounded.double() * scale.double()[..., None]
        residuals[rows] = left.square().sum((1, 2)).sqrt().float()
        lengths[rows] = w.double().square().sum((1, 2)).sqrt().float()
        if gain:
            squares += _squares(left.flatten(1))
    found = Matrix(outputs, inner, whole, scales, residuals[:outputs], float(lengths.max()), float(residuals.max()))
    return replace(found, gain=_largest(squares, outputs)) if gain else found


SUMMED = 256  # rows in one float32 sum


def _squares(left: Tensor) -> Tensor:
    """R^T R of rows at length 1."""
    unit = (left / left.norm(dim=1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)).float()
    return sum((part.T @ part).double() for part in unit.split(SUMMED))


def _largest(squares: Tensor, rows: int) -> float:
    """The largest |R u| / |u|: root of the largest eigenvalue, with all that rounding can have taken from it."""
    if not bool(squares.isfinite().all()):
        return torch.inf
    rounding = (SUMMED + 8) * 2.0**-24 * rows  # of sums of SUMMED products, whose sizes add up to at most `rows`
    return (float(torch.linalg.eigvalsh(squares)[-1]) + rounding) ** 0.5
