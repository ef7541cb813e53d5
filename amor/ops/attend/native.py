"""Queries, each against the first keys of its row, in C++: lone ones for decode; blocks.py has many at once, with gradients."""

import ctypes
from ctypes import c_float, c_int, c_long, c_void_p
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from amor.errors import AmorError
from amor.ops import native
from amor.ops.attend import blocks

SOURCE = Path(__file__).with_suffix(".cpp")


def missing() -> str | None:
    return native.missing(SOURCE) or native.missing(blocks.SOURCE)


fired, causal, upto = blocks.attend, blocks.causal, blocks.upto


@cache
def library() -> ctypes.CDLL:
    found = native.library(SOURCE)
    found.attend.argtypes, found.attend.restype = [*[c_void_p] * 5, *[c_long] * 7, c_float, c_void_p, c_int], c_int
    return found


def attend(
    q: Tensor,  # [n, H, d] float32
    k: Tensor,  # [B, H, L, d] the keys of a row and head in one piece
    v: Tensor,  # laid out as k
    rows: Tensor,  # [n] the row of each query
    lengths: Tensor,  # [n] how many keys it sees
) -> Tensor:  # [n, H, d]
    size = q.shape[-1]
    if k.stride()[2:] != (size, 1) or v.stride() != k.stride():
        k, v = k.contiguous(), v.contiguous()
    q, rows, lengths = q.contiguous(), rows.contiguous(), lengths.contiguous()
    out = torch.empty_like(q)
    pointers = [t.data_ptr() for t in (q, k, v, rows, lengths)]
    sizes = len(q), k.shape[0], k.shape[2], q.shape[1], size, k.stride(0), k.stride(1)
    if library().attend(*pointers, *sizes, size**-0.5, out.data_ptr(), torch.get_num_threads()):
        raise AmorError(
            f"queries of rows {rows.tolist()} that see {lengths.tolist()} keys; the state holds {list(k.shape[:3:2])}"
        )
    return out
