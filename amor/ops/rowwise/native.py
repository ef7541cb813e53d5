"""RMS norm, SwiGLU and rotary embedding in C++; only inputs are kept for the gradient."""

import ctypes
from ctypes import c_float, c_int, c_long, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from amor.ops import native

SOURCE = Path(__file__).with_suffix(".cpp")
# rows whose part of a weight's gradient is summed together: a fixed cut, so that sums do not depend
# on threads
BLOCK = 64


def missing() -> str | None:
    """Why this backend cannot run here (no compiler, say), or None."""
    return native.missing(SOURCE)


@cache
def library() -> ctypes.CDLL:
    """The compiled library, its structs checked against those above."""
    loaded = native.library(SOURCE, _Turn)
    loaded.norm_forward.argtypes = [c_void_p, c_void_p, c_long, c_long, c_float, c_void_p, c_int]
    loaded.norm_backward.argtypes = [
        *[c_void_p] * 3,
        *[c_long] * 3,
        c_float,
        c_void_p,
        c_void_p,
        c_int,
    ]
    loaded.swiglu_forward.argtypes = [c_void_p, c_void_p, c_long, c_void_p, c_int]
    loaded.swiglu_backward.argtypes = [*[c_void_p] * 3, c_long, c_void_p, c_void_p, c_int]
    loaded.rotate.argtypes = [*[c_void_p] * 4, c_int, c_void_p, c_int]
    return loaded


def learns(*tensors: Tensor) -> bool:
    """Whether any of the tensors needs a gradient."""
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight; x [..., n], weight [n]."""
    inputs = x.float().contiguous(), weight.float().contiguous()
    return (
        _NormFunction.apply(*inputs, eps) if learns(*inputs) else norm_forward(*inputs, eps)
    ).to(x.dtype)


def norm_forward(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The norm without a gradient."""
    y, n = torch.empty_like(x), len(weight)
    rows = x.numel() // n
    library().norm_forward(
        x.data_ptr(), weight.data_ptr(), rows, n, eps, y.data_ptr(), torch.get_num_threads()
    )
    return y


class _NormFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return norm_forward(x, weight, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        n = len(weight)
        rows = x.numel() // n
        dy, dx, dw = dy.contiguous(), torch.empty_like(x), x.new_empty(-(-rows // BLOCK), n)
        read = (t.data_ptr() for t in (x, weight, dy))
        library().norm_backward(
            *read, rows, n, BLOCK, ctx.eps, dx.data_ptr(), dw.data_ptr(), torch.get_num_threads()
        )
        return dx, dw.sum(0), None


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, [..., n] each."""
    inputs = gate.float().contiguous(), up.float().contiguous()
    return (_SwiGLUFunction.apply(*inputs) if learns(*inputs) else swiglu_forward(*inputs)).to(
        gate.dtype
    )


def swiglu_forward(gate: Tensor, up: Tensor) -> Tensor:
    """SwiGLU without a gradient."""
    y = torch.empty_like(gate)
    library().swiglu_forward(
        gate.data_ptr(), up.data_ptr(), y.numel(), y.data_ptr(), torch.get_num_threads()
    )
    return y


class _SwiGLUFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return swiglu_forward(gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        dy, dgate, dup = dy.contiguous(), torch.empty_like(gate), torch.empty_like(up)
        read = (t.data_ptr() for t in (gate, up, dy))
        library().swiglu_backward(
            *read, dy.numel(), dgate.data_ptr(), dup.data_ptr(), torch.get_num_threads()
        )
        return dgate, dup


class _Turn(ctypes.Structure):
    _fields_ = [
        (name, c_long) for name in ("rows", "tokens", "heads", "half", "x_row", "x_token", "x_head")
    ]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [..., heads, size]; cos, sin [..., size/2]."""
    cos, sin = cos.float().contiguous(), sin.float().contiguous()
    return (
        _RotateFunction.apply(x.float(), cos, sin)
        if learns(x)
        else turned(x.float(), cos, sin, back=False)
    ).to(x.dtype)


def turned(x: Tensor, cos: Tensor, sin: Tensor, back: bool) -> Tensor:
    """x [..., heads, size] rotated, or rotated back; all dimensions but the last may be strided."""
    x = x if x.stride(-1) == 1 and x.ndim <= 4 else x.contiguous()
    y = torch.empty(x.shape)
    flat = x if x.ndim == 4 else x.reshape(1, -1, *x.shape[-2:])
    turn = _Turn(*flat.shape[:3], flat.shape[3] // 2, *flat.stride()[:3])
    memory = (t.data_ptr() for t in (flat, cos, sin))
    library().rotate(
        ctypes.addressof(turn), *memory, int(back), y.data_ptr(), torch.get_num_threads()
    )
    return y


class _RotateFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return turned(x, cos, sin, back=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return turned(dy, cos, sin, back=True), None, None
