"""Skinny products in C++: one pass over the weights for up to 8 rows, a row's bits the same whatever its neighbours are."""

import ctypes
from ctypes import c_double, c_int, c_long, c_void_p
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from amor.ops import native
from amor.ops.product.matrix import GROUP, TILE, TOLD, Matrix, Probe

SOURCE = Path(__file__).with_suffix(".cpp")


def missing() -> str | None:
    return native.missing(SOURCE)


class Described(ctypes.Structure):
    """A Matrix for C++, as native.cpp has it."""

    _fields_ = [
        *((name, c_void_p) for name in ("weight", "scales", "residuals")),
        *((name, c_long) for name in ("outputs", "inner")),
        *((name, c_double) for name in ("longest", "worst", "gain")),
    ]

    @classmethod
    def of(cls, m: Matrix) -> "Described":
        memory = (None if t is None else t.data_ptr() for t in (m.weight, m.scales, m.residuals))
        return cls(*memory, m.outputs, m.inner, m.longest, m.worst, m.gain)


@cache
def _functions() -> ctypes.CDLL:
    """The library with the types of its arguments, so that plain numbers can be handed in."""
    library = native.library(SOURCE)
    p, n, i, matrix = c_void_p, c_long, c_int, ctypes.POINTER(Described)
    library.round_rows.argtypes = [p, n, n, n, p, p]
    library.product.argtypes = [matrix, p, n, p, n, i, i]
    library.probe.argtypes = [matrix, p, n, p, n, p, p, i]
    library.refine_row.argtypes, library.refine_row.restype = [matrix, matrix, p, n, p, p, n, p, i], n
    library.best_row.argtypes, library.best_row.restype = [matrix, matrix, p, p, p, i], n
    library.stream.argtypes, library.stream.restype = [p, n, i], ctypes.c_float
    return library


def rounded(x: Tensor, matrix: Matrix) -> tuple[Tensor, Tensor]:
    """x [R, K] as whole numbers of 16 bits, and what one of them stands for in each row."""
    padded = 2 * matrix.weight.shape[1]
    whole, units = torch.empty(len(x), padded, dtype=torch.int16), torch.empty(len(x))
    _functions().round_rows(x.data_ptr(), *x.shape, padded, whole.data_ptr(), units.data_ptr())
    return whole, units


def product(x: Tensor, matrix: Matrix, out: Tensor | None = None, add: bool = False) -> Tensor:
    x = x.float().contiguous()
    y = torch.empty(x.shape[0], matrix.outputs) if out is None else out
    memory = x.data_ptr(), x.shape[0], y.data_ptr(), y.stride(0)
    _functions().product(Described.of(matrix), *memory, add, torch.get_num_threads())
    return y


def probe(x: Tensor, matrix: Matrix, logits: bool = False, last: int | None = None) -> Probe:
    x = x.float().contiguous()
    rows = x.shape[0]
    kept = 0 if not logits else rows if last is None else last
    y = torch.empty(kept, matrix.outputs) if logits else None
    told, tokens = torch.empty(len(TOLD), rows), torch.empty(rows, dtype=torch.long)
    memory = x.data_ptr(), rows, None if y is None else y.data_ptr(), rows - kept, told.data_ptr(), tokens.data_ptr()
    _functions().probe(Described.of(matrix), *memory, torch.get_num_threads())
    return Probe(told, tokens, y)


def refined(x: Tensor, exact: Matrix, copy: Matrix, logits: Tensor, likely: int) -> tuple[Probe, int]:
    """As in reference.py, but of the likeliest it may look at a few more, and of nearly equal ones leave out some."""
    x, logits, rows, looked_at = x.float().contiguous(), logits.contiguous(), x.shape[0], 0
    told, tokens = torch.empty(len(TOLD), rows), torch.empty(rows, dtype=torch.long)
    for row in range(rows):
        to = told[0, row:].data_ptr(), rows, tokens[row:].data_ptr()
        mine = Described.of(exact), Described.of(copy), x[row].data_ptr(), likely, logits[row].data_ptr()
        looked_at += _functions().refine_row(*mine, *to, torch.get_num_threads())
    return Probe(told, tokens), looked_at


def best(x: Tensor, exact: Matrix, copy: Matrix, logits: Tensor) -> tuple[Tensor, int]:
    x, logits, tokens, looked_at = x.float().contiguous(), logits.contiguous(), torch.empty(len(x), dtype=torch.long), 0
    for row in range(len(x)):
        memory = x[row].data_ptr(), logits[row].data_ptr(), tokens[row:].data_ptr()
        looked_at += _functions().best_row(Described.of(exact), Described.of(copy), *memory, torch.get_num_threads())
    return tokens, looked_at


def stream(data: Tensor) -> float:
    """The sum of a float32 tensor, read as fast as memory gives it."""
    return float(_functions().stream(data.data_ptr(), data.numel(), torch.get_num_threads()))


assert (GROUP, TILE) == (64, 16), "skinny.h has these numbers built in"
