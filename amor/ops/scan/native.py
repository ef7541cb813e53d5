"""The Mamba2 recurrence in matrix form in C++ (native.cpp), with its gradient written by hand.

Memory beyond inputs and outputs, in floats per row: T (H P + G chunk) + (T / chunk) H P S kept for
the gradient, and while it runs T (2 S + chunk) for every block of heads; linear in T.
"""

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from amor.ops import native
from amor.ops.chunks import LARGEST, chunk_size

SOURCE = Path(__file__).with_suffix(".cpp")
# heads whose gradients of B and C are summed together; more need less memory, fewer use more
# threads
BLOCK = 4
# tokens: up to here the recurrence is as fast as its matrix form (at P = 64, S = 128 on AVX2)
FEW = 16


def missing() -> str | None:
    """Why this backend cannot run here (no compiler, say), or None."""
    return native.missing(SOURCE)


class _Shape(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_long)
        for name in ("rows", "length", "heads", "size", "groups", "width", "chunk")
    ]


class _Inputs(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_void_p) for name in ("x", "dt", "A", "B", "C", "D", "state", "reset")
    ] + [
        (name, ctypes.c_long)
        for name in ("x_row", "x_token", "B_row", "B_token", "C_row", "C_token")
    ]


class _Grads(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_void_p)
        for name in ("y", "state", "x", "dt", "A", "D", "started", "B", "C", "scores")
    ]


@cache
def library() -> ctypes.CDLL:
    """The compiled library, its structs checked against those above."""
    return native.library(SOURCE, _Shape, _Inputs, _Grads, MAX_CHUNK=LARGEST)


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
    """As the reference; chunk: tokens per chunk, by default that of amor/ops/chunks.py."""
    x, B, C = (native.inner_dense(t.float()) for t in (x, B, C))
    dt, A = dt.float().contiguous(), A.float().contiguous()
    D, state = (None if t is None else t.float().contiguous() for t in (D, state))
    reset = None if reset is None else reset.contiguous()
    inputs = x, dt, A, B, C, D, state, reset
    wanted = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs)
    if chunk is None and not wanted and x.shape[1] <= FEW:
        return token_by_token(inputs, x.new_empty(len(x), *x.shape[2:], B.shape[3]))
    if chunk is None:
        chunk = chunk_size("scan", "native", x.shape[1], (x.shape[2], x.shape[3], B.shape[3]))
    if wanted:
        return _ScanFunction.apply(*inputs, chunk)
    return forward(inputs, chunk, scores_buffer(x, B, chunk), None, None)


def token_by_token(inputs: tuple[Tensor | None, ...], after: Tensor) -> tuple[Tensor, Tensor]:
    """The recurrence itself, without a gradient; the state after is written into `after`."""
    shape, described = describe(inputs, 1)
    y = after.new_empty(shape.rows, shape.length, shape.heads, shape.size)
    outputs = native.pointer(y), native.pointer(after), native.threads()
    library().scan_step(ctypes.byref(shape), ctypes.byref(described), *outputs)
    return y, after


def scores_buffer(x: Tensor, B: Tensor, chunk: int) -> Tensor:
    """Memory for the products C B^T of every chunk, [B, G, chunks, Q, Q]."""
    return x.new_empty(len(x), B.shape[2], -(-x.shape[1] // chunk), chunk, chunk)


def describe(inputs: tuple[Tensor | None, ...], chunk: int) -> tuple[_Shape, _Inputs]:
    """The structs of a call."""
    x, _, _, B, C = inputs[:5]
    assert x is not None and B is not None and C is not None
    strides = [t.stride(i) for t in (x, B, C) for i in (0, 1)]
    return _Shape(*x.shape, *B.shape[2:], chunk), _Inputs(
        *(native.pointer(t) for t in inputs), *strides
    )


def forward(
    inputs: tuple[Tensor | None, ...],
    chunk: int,
    scores: Tensor,
    carried: Tensor | None,
    starts: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """y and the state after, without a gradient.

    carried [B, T, H, P], starts [B, H, chunks, S, P]: filled, where given, with the part of y that
    comes from the state and the state before each chunk.
    """
    shape, described = describe(inputs, chunk)
    y = scores.new_empty(shape.rows, shape.length, shape.heads, shape.size)
    after = scores.new_empty(shape.rows, shape.heads, shape.size, shape.width)
    threads = native.threads()
    workspace = scores.new_empty(threads.value, shape.width * shape.size + chunk * chunk)
    outputs = [native.pointer(t) for t in (scores, y, carried, starts, after, workspace)]
    library().scan_forward(ctypes.byref(shape), ctypes.byref(described), *outputs, threads)
    return y, after


class _ScanFunction(torch.autograd.Function):
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
        scores = scores_buffer(x, B, chunk)
        carried = x.new_empty(x.shape)
        starts = x.new_empty(len(x), x.shape[2], scores.shape[2], B.shape[3], x.shape[3])
        ctx.save_for_backward(x, dt, A, B, C, D, state, reset, scores, carried, starts)
        ctx.chunk = chunk
        return forward((x, dt, A, B, C, D, state, reset), chunk, scores, carried, starts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, dstate: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, scores, carried, starts = ctx.saved_tensors
        x, dt, _, B, C, D, state, _ = inputs
        shape, described = describe(tuple(inputs), ctx.chunk)
        dy, dstate = dy.contiguous(), dstate.contiguous()
        dx, ddt, dB, dC, started = (t.new_empty(t.shape) for t in (x, dt, B, C, dstate))
        dA, dD = x.new_empty(shape.rows, shape.heads), x.new_empty(shape.rows, shape.heads)
        block = shared_heads(shape.heads // shape.groups)
        parts = shape.rows * shape.heads // block, scores.shape[2]
        turned = [x.new_empty(*parts, shape.width, ctx.chunk) for _ in range(2)]
        pairs = x.new_empty(*parts, ctx.chunk, ctx.chunk)
        grads = _Grads(
            *(native.pointer(t) for t in (dy, dstate, dx, ddt, dA, dD, started, *turned, pairs))
        )
        threads = native.threads()
        workspace = x.new_empty(
            threads.value,
            2 * ctx.chunk * (ctx.chunk + shape.size) + block * shape.width * shape.size,
        )
        kept, last = (
            [native.pointer(t) for t in ts]
            for ts in ((scores, carried, starts), (dB, dC, workspace))
        )
        arguments = (*kept, ctypes.byref(grads), ctypes.c_long(block), *last, threads)
        library().scan_backward(ctypes.byref(shape), ctypes.byref(described), *arguments)
        skip = None if D is None else dD.sum(0)
        return dx, ddt, dA.sum(0), dB, dC, skip, None if state is None else started, None, None


def shared_heads(heads: int) -> int:
    """How many of a group's heads are summed together: the largest divisor up to BLOCK."""
    return next(b for b in range(min(BLOCK, heads), 0, -1) if heads % b == 0)
