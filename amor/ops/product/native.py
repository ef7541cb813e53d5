"""Skinny products in C++: one pass over the weights for up to 8 rows, a row's bits the same whatever its neighbours are."""

import ctypes
from ctypes import c_int, c_long, c_void_p
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from amor.ops import native
from amor.ops.product.matrix import GROUP, TILE, TOLD, Matrix, Probe

SOURCE = Path(__file__).with_suffix(".cpp")
MOST = 8  # rows of x in one pass
SLAB, FACTS = 512, 8  # as in native.cpp


def missing() -> str | None:
    return native.missing(SOURCE)


@cache
def _functions() -> ctypes.CDLL:
    """The library with the types of its arguments, so that plain numbers can be handed in."""
    library = native.library(SOURCE)
    p, n, i = c_void_p, c_long, c_int
    library.round_rows.argtypes = [p, n, n, n, p, p]
    library.product_floats.argtypes = [p, n, n, p, i, p, n, i, i]
    library.product_bytes.argtypes = [p, p, n, n, p, i, p, n, i, i]
    library.probe_floats.argtypes = [p, n, n, p, i, p, i, p, p, i]
    library.probe_bytes.argtypes = [p, p, n, n, p, i, p, i, p, p, p, i]
    library.conclude.argtypes = [p, n, p, n, p, p, p, p]
    library.refine_row.argtypes, library.refine_row.restype = [p, n, n, p, n, p, p, p, p, p, i], n
    library.best_row.argtypes, library.best_row.restype = [p, n, n, p, p, p, p, p, i], n
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
    rows = x.shape[0]
    y = torch.empty(rows, matrix.outputs) if out is None else out
    if rows <= MOST:
        _few(x, rows, matrix, y, add)
        return y
    for start in range(0, rows, MOST):
        part = x[start : start + MOST]
        _few(part, part.shape[0], matrix, y[start : start + MOST], add)
    return y


def _few(x: Tensor, rows: int, matrix: Matrix, y: Tensor, add: bool) -> None:
    shape = matrix.outputs, matrix.inner, x.data_ptr(), rows, y.data_ptr(), y.stride(0), add, torch.get_num_threads()
    if matrix.scales is None:
        _functions().product_floats(matrix.weight.data_ptr(), *shape)
    else:
        _functions().product_bytes(matrix.weight.data_ptr(), matrix.scales.data_ptr(), *shape)


def probe(x: Tensor, matrix: Matrix, logits: bool = False, last: int | None = None) -> Probe:
    x = x.float().contiguous()
    rows = x.shape[0]
    facts = torch.empty(rows, FACTS, dtype=torch.float64)
    kept = 0 if not logits else rows if last is None else last
    y = torch.empty(kept, matrix.outputs) if logits else None
    for start in range(0, rows, MOST):
        here, skipped = min(MOST, rows - start), rows - kept - start  # rows of this pass, and how many of them are not kept
        to = None if y is None or skipped >= here else y[max(0, -skipped) :]
        _probe_few(x[start : start + here], matrix, to, max(0, skipped), facts[start : start + here])
    return _told(facts, x, matrix, y)


def refined(x: Tensor, exact: Matrix, copy: Matrix, logits: Tensor, likely: int) -> tuple[Probe, int]:
    """As in reference.py, but of the likeliest it may look at a few more, and of nearly equal ones leave out some."""
    assert copy.residuals is not None
    x, logits, looked_at = x.float().contiguous(), logits.contiguous(), 0
    facts, weighed = (torch.empty(len(x), n, dtype=torch.float64) for n in (FACTS, 2))
    room = torch.empty(-(-exact.outputs // SLAB) * FACTS, dtype=torch.float64)
    shape = exact.weight.data_ptr(), exact.outputs, exact.inner
    for row, mine in enumerate(x):
        memory = (t.data_ptr() for t in (logits[row], copy.residuals, facts[row], weighed[row], room))
        looked_at += _functions().refine_row(*shape, mine.data_ptr(), likely, *memory, torch.get_num_threads())
    return _told(facts, x, copy, None, weighed), looked_at


def best(x: Tensor, exact: Matrix, copy: Matrix, logits: Tensor) -> tuple[Tensor, int]:
    assert copy.residuals is not None
    x, logits, tokens, looked_at = x.float().contiguous(), logits.contiguous(), torch.empty(len(x), dtype=torch.long), 0
    shape = exact.weight.data_ptr(), exact.outputs, exact.inner
    for row in range(len(x)):
        memory = x[row].data_ptr(), logits[row].data_ptr(), copy.residuals.data_ptr(), _limits(copy), tokens[row:].data_ptr()
        looked_at += _functions().best_row(*shape, *memory, torch.get_num_threads())
    return tokens, looked_at


def _limits(matrix: Matrix) -> ctypes.Array | None:
    """What bounds the errors of 8-bit weights; None where there are none."""
    return None if matrix.residuals is None else (ctypes.c_double * 3)(matrix.longest, matrix.worst, matrix.gain)


def _told(facts: Tensor, x: Tensor, matrix: Matrix, y: Tensor | None, weighed: Tensor | None = None) -> Probe:
    rows = facts.shape[0]
    told, token = torch.empty(len(TOLD), rows), torch.empty(rows, dtype=torch.long)
    where = None if weighed is None else weighed.data_ptr()
    memory = facts.data_ptr(), rows, x.data_ptr(), matrix.inner, _limits(matrix), where
    _functions().conclude(*memory, told.data_ptr(), token.data_ptr())
    return Probe(told, token, y)


def _probe_few(x: Tensor, matrix: Matrix, y: Tensor | None, first: int, facts: Tensor) -> None:
    """One pass; the logits of rows from `first` on go to y."""
    rows = x.shape[0]
    room = torch.empty(rows * -(-matrix.outputs // SLAB) * FACTS, dtype=torch.float64)
    logits = (None, rows) if y is None else (y.data_ptr(), first)
    tail = facts.data_ptr(), room.data_ptr(), torch.get_num_threads()
    shape = matrix.outputs, matrix.inner, x.data_ptr(), rows, *logits
    if matrix.scales is None or matrix.residuals is None:
        _functions().probe_floats(matrix.weight.data_ptr(), *shape, *tail)
    else:
        weights = matrix.weight.data_ptr(), matrix.scales.data_ptr()
        _functions().probe_bytes(*weights, *shape, matrix.residuals.data_ptr(), *tail)


def stream(data: Tensor) -> float:
    """The sum of a float32 tensor, read as fast as memory gives it."""
    return float(_functions().stream(data.data_ptr(), data.numel(), torch.get_num_threads()))


assert (GROUP, TILE) == (64, 16), "skinny.h has these numbers built in"
