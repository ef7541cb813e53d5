"""The gated delta rule in matrix form in C++ (native.cpp), with its gradient written by hand.

There is one decay per head or per channel; C++ gets their number. Memory beyond inputs and outputs,
in floats per row: T H V + (T / chunk) H K V kept for the gradient; linear in T.
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
CHANNEL_ROOM = 9  # workspace, floats per channel and token of a chunk, with a decay per channel
# tokens: up to here the recurrence is as fast as its matrix form (at K = 64, V = 128 on AVX2)
FEW = 16


def missing() -> str | None:
    """Why this backend cannot run here (no compiler, say), or None."""
    return native.missing(SOURCE)


class _Shape(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_long)
        for name in ("rows", "length", "heads", "keys", "values", "chunk", "decays")
    ]


class _Inputs(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_void_p) for name in ("q", "k", "v", "g", "beta", "state", "reset")
    ] + [
        (name, ctypes.c_long)
        for name in ("q_row", "q_token", "k_row", "k_token", "v_row", "v_token")
    ]


class _Grads(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_void_p) for name in ("o", "state", "q", "k", "v", "g", "beta", "started")
    ]


@cache
def library() -> ctypes.CDLL:
    """The compiled library, its structs checked against those above."""
    return native.library(
        SOURCE, _Shape, _Inputs, _Grads, MAX_CHUNK=LARGEST, CHANNEL_ROOM=CHANNEL_ROOM
    )


def delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor | None = None,
    reset: Tensor | None = None,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """As the reference; chunk: tokens per chunk, by default that of amor/ops/chunks.py."""
    q, k, v = (native.inner_dense(t.float()) for t in (q, k, v))
    g, beta = g.float().contiguous(), beta.float().contiguous()
    state = None if state is None else state.float().contiguous()
    reset = None if reset is None else reset.contiguous()
    inputs = q, k, v, g, beta, state, reset
    wanted = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs)
    if chunk is None and not wanted and k.shape[1] <= FEW:
        return token_by_token(inputs, k.new_empty(len(k), *k.shape[2:], v.shape[3]))
    if chunk is None:
        chunk = chunk_size("delta", "native", k.shape[1], (k.shape[2], k.shape[3], v.shape[3]))
    if wanted:
        return _DeltaFunction.apply(*inputs, chunk)
    return forward(inputs, chunk, None, None)


def token_by_token(inputs: tuple[Tensor | None, ...], after: Tensor) -> tuple[Tensor, Tensor]:
    """The recurrence itself, without a gradient; the state after is written into `after`."""
    shape, described = describe(inputs, 1)
    threads = native.threads()
    o = after.new_empty(shape.rows, shape.length, shape.heads, shape.values)
    workspace = after.new_empty(threads.value, shape.values + shape.keys)
    outputs = [native.pointer(t) for t in (o, after, workspace)]
    library().delta_step(ctypes.byref(shape), ctypes.byref(described), *outputs, threads)
    return o, after


def describe(inputs: tuple[Tensor | None, ...], chunk: int) -> tuple[_Shape, _Inputs]:
    """The structs of a call."""
    q, k, v, g = inputs[:4]
    assert q is not None and k is not None and v is not None and g is not None
    strides = [t.stride(i) for t in (q, k, v) for i in (0, 1)]
    decays = 1 if g.ndim == 3 else g.shape[3]
    return _Shape(*k.shape, v.shape[3], chunk, decays), _Inputs(
        *(native.pointer(t) for t in inputs), *strides
    )


def channels(shape: _Shape) -> int:
    """Workspace for decays per channel, in floats per token of a chunk."""
    return CHANNEL_ROOM * shape.keys if shape.decays > 1 else 0


def forward(
    inputs: tuple[Tensor | None, ...], chunk: int, solved: Tensor | None, starts: Tensor | None
) -> tuple[Tensor, Tensor]:
    """o and the state after, without a gradient.

    solved [B, T, H, V], starts [B, H, chunks, K, V]: filled, where given, with the corrected values
    and the state before each chunk.
    """
    shape, described = describe(inputs, chunk)
    k = inputs[1]
    assert k is not None
    o = k.new_empty(shape.rows, shape.length, shape.heads, shape.values)
    after = k.new_empty(shape.rows, shape.heads, shape.keys, shape.values)
    threads = native.threads()
    workspace = k.new_empty(threads.value, chunk * (3 * chunk + 2 * shape.values + channels(shape)))
    outputs = [native.pointer(t) for t in (o, solved, starts, after, workspace)]
    library().delta_forward(ctypes.byref(shape), ctypes.byref(described), *outputs, threads)
    return o, after


class _DeltaFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        state: Tensor | None,
        reset: Tensor | None,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        rows, length, heads, size = k.shape
        solved = v.new_empty(rows, length, heads, v.shape[3])
        starts = v.new_empty(rows, heads, -(-length // chunk), size, v.shape[3])
        ctx.save_for_backward(q, k, v, g, beta, state, reset, solved, starts)
        ctx.chunk = chunk
        return forward((q, k, v, g, beta, state, reset), chunk, solved, starts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor, dstate: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, solved, starts = ctx.saved_tensors
        shape, described = describe(tuple(inputs), ctx.chunk)
        do, dstate = do.contiguous(), dstate.contiguous()
        wanted = [t.new_empty(t.shape) for t in (*inputs[:5], dstate)]
        grads = _Grads(*(native.pointer(t) for t in (do, dstate, *wanted)))
        threads = native.threads()
        workspace = do.new_empty(
            threads.value,
            ctx.chunk * (4 * ctx.chunk + 2 * shape.values + shape.keys + channels(shape)),
        )
        kept = [native.pointer(t) for t in (solved, starts)]
        arguments = (*kept, ctypes.byref(grads), native.pointer(workspace), threads)
        library().delta_backward(ctypes.byref(shape), ctypes.byref(described), *arguments)
        return *wanted[:5], None if inputs[5] is None else wanted[5], None, None
