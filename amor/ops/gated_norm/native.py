"""RMS norm and a SiLU gate in C++ (native.cpp); nothing but the inputs is kept for the gradient."""

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from amor.ops import native

SOURCE = Path(__file__).with_suffix(".cpp")
# tokens whose part of the weight's gradient is summed together: a fixed cut, so that sums do not
# depend on threads
BLOCK = 128


def missing() -> str | None:
    """Why this backend cannot run here (no compiler, say), or None."""
    return native.missing(SOURCE)


SIZES = ("rows", "tokens", "per_token", "n", "block", "x_row", "x_token", "z_row", "z_token")


class _Shape(ctypes.Structure):
    _fields_ = [(name, ctypes.c_long) for name in SIZES] + [("eps", ctypes.c_float)]


@cache
def library() -> ctypes.CDLL:
    """The compiled library, its structs checked against those above."""
    return native.library(SOURCE, _Shape)


def gate_norm(x: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The gate, then the norm, as Mamba2 has it; x, z [..., n], weight [n]."""
    return apply(x, z, weight, eps, gate_first=True)


def norm_gate(x: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The norm, then the gate, as Gated DeltaNet has it; x, z [..., n], weight [n]."""
    return apply(x, z, weight, eps, gate_first=False)


def apply(x: Tensor, z: Tensor, weight: Tensor, eps: float, gate_first: bool) -> Tensor:
    """Both orders, with a gradient where one is needed."""
    inputs = tokens_apart(x.float()), tokens_apart(z.float()), weight.float().contiguous()
    if torch.is_grad_enabled() and any(t.requires_grad for t in inputs):
        return _GatedNormFunction.apply(*inputs, eps, gate_first).to(z.dtype)
    return forward(*inputs, eps, gate_first).to(z.dtype)


def tokens_apart(t: Tensor) -> Tensor:
    """t [B, T, ...], copied unless all but its first two dimensions are dense, as after a split."""
    size = 1
    for dim in range(t.ndim - 1, 1, -1):
        if t.stride(dim) != size:
            return t.contiguous()
        size *= t.shape[dim]
    return t


def describe(x: Tensor, z: Tensor, weight: Tensor, eps: float) -> _Shape:
    """The struct of a call."""
    n = len(weight)
    return _Shape(
        *x.shape[:2], x[0, 0].numel() // n, n, BLOCK, *x.stride()[:2], *z.stride()[:2], eps
    )


def forward(x: Tensor, z: Tensor, weight: Tensor, eps: float, gate_first: bool) -> Tensor:
    """The result without a gradient."""
    y = x.new_empty(x.shape)
    tensors = [native.pointer(t) for t in (x, z, weight, y)]
    shape = describe(x, z, weight, eps)
    library().norm_forward(ctypes.byref(shape), int(gate_first), *tensors, native.threads())
    return y


class _GatedNormFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, z: Tensor, weight: Tensor, eps: float, gate_first: bool
    ) -> Tensor:
        ctx.save_for_backward(x, z, weight)
        ctx.eps, ctx.gate_first = eps, gate_first
        return forward(x, z, weight, eps, gate_first)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, z, weight = ctx.saved_tensors
        dy, dx, dz = dy.contiguous(), x.new_empty(x.shape), x.new_empty(x.shape)
        dw = x.new_empty(-(-x.shape[0] * x.shape[1] // BLOCK), len(weight))
        tensors = [native.pointer(t) for t in (x, z, weight, dy, dx, dz, dw)]
        shape = describe(x, z, weight, ctx.eps)
        library().norm_backward(
            ctypes.byref(shape), int(ctx.gate_first), *tensors, native.threads()
        )
        return dx, dz, dw.sum(0), None, None
