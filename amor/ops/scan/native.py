"""The Mamba2 recurrence in matrix form as C++ for this machine (native.cpp), with its gradient written by hand.

Memory beyond inputs and outputs, in floats a row: T (H P + G chunk) + (T / chunk) H P S kept for the gradient, and while
it runs T (2 S + chunk) for every block of heads; linear in T.
"""

import ctypes
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from amor.ops import native
from amor.ops.chunks import chunk_size

SOURCE = Path(__file__).with_suffix(".cpp")
BLOCK = 4  # heads that share a part of the gradients of B and C; more is less memory, fewer is more threads at work


def missing() -> str | None:
    return native.missing(SOURCE)


class Shape(ctypes.Structure):
    _fields_ = [(name, ctypes.c_long) for name in ("rows", "length", "heads", "size", "groups", "width", "chunk")]


class Inputs(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in ("x", "dt", "A", "B", "C", "D", "state", "reset")] + [
        (name, ctypes.c_long) for name in ("x_row", "x_token", "B_row", "B_token", "C_row", "C_token")
    ]


class Grads(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in ("y", "state", "x", "dt", "A", "D", "started", "B", "C", "scores")]


def scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    state: Tensor | None = None,
    reset: Tensor | None = None,
    D: Tensor | None = None,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    if chunk is None:
        chunk = chunk_size("scan", "native", x.shape[1], (x.shape[2], x.shape[3], B.shape[3]))
    x, B, C = (inner_dense(t.float()) for t in (x, B, C))
    dt, A = dt.float().contiguous(), A.float().contiguous()
    D, state = (None if t is None else t.float().contiguous() for t in (D, state))
    wanted = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, dt, A, B, C, D, state))
    if wanted:
        return Scan.apply(x, dt, A, B, C, D, state, reset, chunk)
    y, after, _ = forward(x, dt, A, B, C, D, state, reset, chunk, keep=False)
    return y, after


def inner_dense(t: Tensor) -> Tensor:
    """t [B, T, h, n] with its last two dimensions dense; rows and tokens may stand apart, as after a split."""
    dense = t.stride(3) == 1 and t.stride(2) == t.shape[3]
    return t if dense else t.contiguous()


def describe(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    state: Tensor | None,
    reset: Tensor | None,
    chunk: int,
) -> tuple[Shape, Inputs]:
    tensors = [native.pointer(t) for t in (x, dt, A, B, C, D, state, reset)]
    strides = [t.stride(i) for t in (x, B, C) for i in (0, 1)]
    return Shape(*x.shape, *B.shape[2:], chunk), Inputs(*tensors, *strides)


def forward(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    state: Tensor | None,
    reset: Tensor | None,
    chunk: int,
    keep: bool,
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """y, the state after, and what the gradient needs (nothing unless it is to be kept)."""
    rows, length, heads, size = x.shape
    groups, width = B.shape[2:]
    count = -(-length // chunk)
    reset = None if reset is None else reset.contiguous()
    shape, inputs = describe(x, dt, A, B, C, D, state, reset, chunk)
    y = x.new_empty(rows, length, heads, size)
    after = x.new_empty(rows, heads, size, width)
    scores = x.new_empty(rows, groups, count, chunk, chunk)
    carried = x.new_empty(rows, length, heads, size) if keep else None
    starts = x.new_empty(rows, heads, count, width, size) if keep else None
    threads = native.threads()
    room = x.new_empty(threads.value, width * size + chunk * (chunk + size))
    outputs = [native.pointer(t) for t in (scores, y, carried, starts, after, room)]
    native.library(SOURCE).scan_forward(ctypes.byref(shape), ctypes.byref(inputs), *outputs, threads)
    return y, after, (scores, carried, starts) if carried is not None and starts is not None else ()


class Scan(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None,
        state: Tensor | None,
        reset: Tensor | None,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        y, after, kept = forward(x, dt, A, B, C, D, state, reset, chunk, keep=True)
        ctx.save_for_backward(x, dt, A, B, C, D, state, reset, *kept)
        ctx.chunk = chunk
        return y, after

    @staticmethod
    def backward(ctx: Any, dy: Tensor, dstate: Tensor) -> tuple[Tensor | None, ...]:
        x, dt, A, B, C, D, state, reset, scores, carried, starts = ctx.saved_tensors
        rows, length, heads, size = x.shape
        groups, width = B.shape[2:]
        block = next(b for b in range(min(BLOCK, heads // groups), 0, -1) if heads // groups % b == 0)
        parts, count, threads = rows * heads // block, starts.shape[2], native.threads()
        reset = None if reset is None else reset.contiguous()
        shape, inputs = describe(x, dt, A, B, C, D, state, reset, ctx.chunk)
        dy, dstate = dy.contiguous(), dstate.contiguous()
        dx, ddt, started = x.new_empty(rows, length, heads, size), torch.empty_like(dt), x.new_empty(rows, heads, size, width)
        dA, dD = x.new_empty(rows, heads), x.new_empty(rows, heads)
        dB, dC = x.new_empty(rows, length, groups, width), x.new_empty(rows, length, groups, width)
        turned = [x.new_empty(parts, count, width, ctx.chunk) for _ in range(2)]
        pairs = x.new_empty(parts, count, ctx.chunk, ctx.chunk)
        grads = Grads(*(native.pointer(t) for t in (dy, dstate, dx, ddt, dA, dD, started, *turned, pairs)))
        room = x.new_empty(threads.value, 2 * ctx.chunk * (ctx.chunk + size) + block * width * size)
        kept = [native.pointer(t) for t in (scores, carried, starts)]
        last = [native.pointer(t) for t in (dB, dC, room)]
        arguments = (*kept, ctypes.byref(grads), ctypes.c_long(block), *last, threads)
        native.library(SOURCE).scan_backward(ctypes.byref(shape), ctypes.byref(inputs), *arguments)
        skip = None if D is None else dD.sum(0)
        return dx, ddt, dA.sum(0), dB, dC, skip, None if state is None else started, None, None
