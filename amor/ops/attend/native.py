"""Attention in C++ with gradients: a query reads no key past the last one it sees."""

import ctypes
from ctypes import c_float, c_int, c_long, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from amor.errors import AmorError
from amor.ops import native

SOURCE = Path(__file__).with_suffix(".cpp")
SIZES = ("rows", "heads", "size", "k_row", "k_head", "k_token", "v_row", "v_head", "v_token")


class _Work(ctypes.Structure):
    _fields_ = [
        *((name, c_long) for name in SIZES),
        *((name, c_void_p) for name in ("first", "lengths", "q", "k", "v")),
        ("scale", c_float),
    ]


def missing() -> str | None:
    """Why this backend cannot run here (no compiler, say), or None."""
    return native.missing(SOURCE)


@cache
def library() -> ctypes.CDLL:
    """The compiled library, its structs checked against those above."""
    loaded = native.library(SOURCE, _Work)
    loaded.fired_forward.argtypes = [c_void_p, c_void_p, c_void_p, c_int]
    loaded.fired_backward.argtypes = [c_void_p, c_long, *[c_void_p] * 6, c_int]
    return loaded


def fired(q: Tensor, k: Tensor, v: Tensor, rows: Tensor, lengths: Tensor) -> Tensor:
    """Queries q [n, H, d] sorted by row, query i against the first lengths[i] keys of row rows[i]
    of k, v [B, H, L, d] -> [n, H, d]."""
    if rows.numel() and (int(rows[-1]) >= len(k) or int(lengths.max()) > k.shape[2]):
        last, key = int(rows[-1]), int(lengths.max())
        raise AmorError(f"queries up to row {last} and key {key}; there are {list(k.shape[:3:2])}")
    first = torch.searchsorted(rows.contiguous(), torch.arange(len(k) + 1))
    inputs = q.float().contiguous(), dense_heads(k.float()), dense_heads(v.float())
    return _AttendFunction.apply(*inputs, first, lengths.contiguous()).to(q.dtype)


def upto(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    """Every query of q [B, H, T, d] against the first `lengths` [B, T] keys of its row."""
    batch, _, length, _ = q.shape
    out = fired(
        q.transpose(1, 2).flatten(0, 1),
        k,
        v,
        torch.arange(batch).repeat_interleave(length),
        lengths.flatten(),
    )
    return out.unflatten(0, (batch, length)).transpose(1, 2)


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Every query t of q [B, H, T, d] against keys 0..t: faster than torch's."""
    return upto(q, k, v, torch.arange(1, q.shape[2] + 1).repeat(len(q), 1))


def dense_heads(t: Tensor) -> Tensor:
    """t [B, H, L, d], copied unless the numbers of a head are dense."""
    return t if t.stride(3) == 1 else t.contiguous()


def describe(q: Tensor, k: Tensor, v: Tensor, first: Tensor, lengths: Tensor) -> _Work:
    """The struct of a call; `first` [B + 1] is where the queries of each row begin."""
    memory = (t.data_ptr() for t in (first, lengths, q, k, v))
    return _Work(
        len(k),
        q.shape[1],
        q.shape[2],
        *k.stride()[:3],
        *v.stride()[:3],
        *memory,
        q.shape[2] ** -0.5,
    )


class _AttendFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, first: Tensor, lengths: Tensor
    ) -> Tensor:
        out, log_sum = torch.empty_like(q), q.new_empty(q.shape[:2])
        work = describe(q, k, v, first, lengths)
        library().fired_forward(
            ctypes.addressof(work), out.data_ptr(), log_sum.data_ptr(), torch.get_num_threads()
        )
        ctx.save_for_backward(q, k, v, first, lengths, out, log_sum)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, first, lengths, out, log_sum = ctx.saved_tensors
        work = describe(q, k, v, first, lengths)
        dout, dq, dk, dv = (
            dout.contiguous(),
            torch.empty_like(q),
            torch.empty_like(k),
            torch.empty_like(v),
        )
        if dk.stride() != k.stride() or dv.stride() != v.stride():
            dk, dv = (torch.empty_strided(t.shape, t.stride()) for t in (k, v))
        memory = (t.data_ptr() for t in (out, log_sum, dout, dq, dk, dv))
        library().fired_backward(
            ctypes.addressof(work), k.shape[2], *memory, torch.get_num_threads()
        )
        return dq, dk, dv, None, None
