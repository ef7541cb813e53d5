"""RMS norm and a SiLU gate as C++ for this machine (native.cpp): one pass forward, one backward, nothing kept but the inputs."""

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from amor.ops import native

SOURCE = Path(__file__).with_suffix(".cpp")
BLOCK = 128  # tokens whose share of the weight's gradient is summed together: a fixed cut, so that sums do not depend on threads


def missing() -> str | None:
    return native.missing(SOURCE)


SIZES = ("rows", "tokens", "per_token", "n", "block", "x_row", "x_token", "z_row", "z_token")


class _Shape(ctypes.Structure):
    _fields_ = [(name, ctypes.c_long) for name in SIZES] + [("eps", ctypes.c_float)]


@cache
def library() -> ctypes.CDLL:
    return native.library(SOURCE, _Shape)


def gate_norm(x: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    return apply(x, z, weight, eps, gate_first=True)


def norm_gate(x: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    return apply(x, z, weight, eps, gate_first=False)


def apply(x: Tensor, z: Tensor, weight: Tensor, eps: float, gate_first: bool) -> Tensor:
    inputs = tokens_apart(x.float()), tokens_apart(z.float()), weight.float().contiguous()
    if torch.is_grad_enabled() and any(t.requires_grad for t in inputs):
        return GatedNorm.apply(*inputs, eps, gate_first).to(z.dtype)
    return forward(*inputs, eps, gate_first).to(z.dtype)


def tokens_apart(t: Tensor) -> Tensor:
    """t [B, T, ...] with all but its first two dimensions dense, as after a split of the last one."""
    size = 1
    for dim in range(t.ndim - 1, 1, -1):
        if t.stride(dim) != size:
            return t.contiguous()
        size *= t.shape[dim]
    return t


def describe(x: Tensor, z: Tensor, weight: Tensor, eps: float) -> _Shape:
    n = len(weight)
    return _Shape(
        *x.shape[:2], x[0, 0].numel() // n, n, BLOCK, *x.stride()[:2], *z.stride()[:2], eps
    )


def forward(x: Tensor, z: Tensor, weight: Tensor, eps: float, gate_first: bool) -> Tensor:
    y = x.new_empty(x.shape)
    tensors = [native.pointer(t) for t in (x, z, weight, y)]
    shape = describe(x, z, weight, eps)
    library().norm_forward(ctypes.byref(shape), int(gate_first), *tensors, native.threads())
    return y


class GatedNorm(torch.autograd.Function):
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
