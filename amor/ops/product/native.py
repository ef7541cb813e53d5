"""Skinny products in C++: one pass over the weights for all rows; a row's bits are its own."""

import ctypes
from ctypes import c_int, c_long, c_void_p
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from amor.errors import AmorError
from amor.ops import native
from amor.ops.head.reference import HeadStats
from amor.ops.native import team
from amor.ops.product.formats import FORMATS, TILE
from amor.ops.product.matrix import Matrix

SOURCE = Path(__file__).with_suffix(".cpp")
STATS = 4  # numbers a probe gives per row: entropy, logsumexp, the two best logits


def missing() -> str | None:
    """Why this backend cannot run here (no compiler, say), or None."""
    return native.missing(SOURCE)


class Weights(ctypes.Structure):
    """A Matrix for C++, as skinny.h has it."""

    _fields_ = [
        *((name, c_void_p) for name in ("weight", "scales")),
        *((name, c_long) for name in ("outputs", "inner", "format")),
    ]

    @classmethod
    def of(cls, m: Matrix) -> "Weights":
        """The struct of a Matrix, which must outlive it."""
        scales = None if m.scales is None else m.scales.data_ptr()
        return cls(m.weight.data_ptr(), scales, m.outputs, m.inner, m.format.tag)


@cache
def library() -> ctypes.CDLL:
    """The library with the types of its arguments, so that plain numbers can be handed in."""
    groups = {f"{name}_group": one.group for name, one in FORMATS.items() if one.group > 1}
    tags = {name: one.tag for name, one in FORMATS.items()}
    loaded = team.join(native.library(SOURCE, Weights, TILE=TILE, STATS=STATS, **tags, **groups))
    p, n, i, matrix = c_void_p, c_long, c_int, ctypes.POINTER(Weights)
    loaded.rounded.argtypes, loaded.rounded.restype = [matrix, p, n, p, p], n
    loaded.product.argtypes = [matrix, p, n, p, n, i, i]
    loaded.probe.argtypes = [matrix, p, n, p, n, p, p, i]
    loaded.entropies.argtypes = [p, n, n, p, i]
    loaded.stream.argtypes, loaded.stream.restype = [p, n, i], ctypes.c_float
    return loaded


def rounded(x: Tensor, matrix: Matrix) -> Tensor:
    """What x [R, K] is rounded to by a format that rounds it, in float64."""
    form, rows = matrix.format, len(x)
    padded = -(-matrix.inner // form.group) * form.group
    whole = torch.empty(rows, padded, dtype=torch.int16 if form.levels > 127 else torch.int8)
    units = torch.empty(rows * (padded // form.steps if form.steps else 1))
    x = x.float().contiguous()
    if library().rounded(
        Weights.of(matrix), x.data_ptr(), rows, whole.data_ptr(), units.data_ptr()
    ) != len(units):
        raise AmorError("native code and formats.py disagree about how many steps x is rounded by")
    return (
        whole.double().unflatten(1, (-1, form.steps or padded)) * units.double().view(rows, -1, 1)
    ).flatten(1)[:, : matrix.inner]


def product(x: Tensor, matrix: Matrix, out: Tensor | None = None, add: bool = False) -> Tensor:
    """As amor.ops.product.product."""
    x = x.float().contiguous()
    y = torch.empty(x.shape[0], matrix.outputs) if out is None else out
    memory = x.data_ptr(), x.shape[0], y.data_ptr(), y.stride(0)
    library().product(Weights.of(matrix), *memory, add, torch.get_num_threads())
    return y


def probe(x: Tensor, matrix: Matrix, logits: bool = False, last: int | None = None) -> HeadStats:
    """As amor.ops.product.probe."""
    x = x.float().contiguous()
    rows = x.shape[0]
    kept = 0 if not logits else rows if last is None else last
    y = torch.empty(kept, matrix.outputs) if logits else None
    stats, tokens = torch.empty(STATS, rows), torch.empty(rows, dtype=torch.long)
    memory = (
        x.data_ptr(),
        rows,
        None if y is None else y.data_ptr(),
        rows - kept,
        stats.data_ptr(),
        tokens.data_ptr(),
    )
    library().probe(Weights.of(matrix), *memory, torch.get_num_threads())
    return HeadStats(
        entropy=stats[0], logsumexp=stats[1], topk=(stats[2:].T, tokens[:, None]), logits=y
    )


def entropies(logits: Tensor) -> Tensor:
    """[R] in nats, of logits [R, V]."""
    logits = logits.float().contiguous()
    nats = torch.empty(len(logits))
    library().entropies(logits.data_ptr(), *logits.shape, nats.data_ptr(), torch.get_num_threads())
    return nats


def stream(data: Tensor) -> float:
    """The sum of a float32 tensor, read as fast as memory gives it."""
    return float(library().stream(data.data_ptr(), data.numel(), torch.get_num_threads()))
