"""The short causal convolution and its SiLU as C++ for this machine (native.cpp), with its gradient
written by hand.

Memory beyond inputs and outputs, in floats: B T C while the gradient runs; linear in T.
"""

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from amor.errors import AmorError
from amor.ops import native
from amor.ops.conv.reference import last_inputs, segments

SOURCE = Path(__file__).with_suffix(".cpp")
MAX_TAPS = 64  # size of an array in native.cpp
# tokens whose part of the weight's gradient is summed together: a fixed cut, so that sums do not
# depend on threads
BLOCK = 128


def missing() -> str | None:
    """Why this backend cannot run here (no compiler, say), or None."""
    return native.missing(SOURCE)


class _Shape(ctypes.Structure):
    _fields_ = [(name, ctypes.c_long) for name in ("rows", "length", "channels", "taps", "block")]


class _Inputs(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in ("x", "weight", "bias", "window", "start")] + [
        (name, ctypes.c_long) for name in ("x_row", "x_token")
    ]


@cache
def library() -> ctypes.CDLL:
    """The compiled library, its structs checked against those above."""
    return native.library(SOURCE, _Shape, _Inputs, MAX_TAPS=MAX_TAPS)


def conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    window: Tensor | None = None,
    lengths: Tensor | None = None,
    reset: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """As the reference; where x has 1 token and no gradient, the kernel of a decode step."""
    wanted = torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in (x, weight, bias, window)
    )
    if x.shape[1] == 1 and not wanted and window is not None and lengths is None and reset is None:
        return step(x, weight, bias, window)
    turned = weight.float().T.contiguous()
    dense = x.float() if x.stride(2) == 1 else x.float().contiguous()
    offset, past = (None if t is None else t.float().contiguous() for t in (bias, window))
    start = None if reset is None else beginnings(reset, weight.shape[1])
    y = (_ConvFunction.apply if wanted else forward)(dense, turned, offset, past, start)
    return y.to(x.dtype), next_window(x, weight.shape[1] - 1, window, lengths, reset)


def step(
    x: Tensor, weight: Tensor, bias: Tensor | None, window: Tensor, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """One token per row without a gradient; the window after it is written into `out`, which may be
    `window`.
    """
    dense, past = x.float().contiguous(), window.float().contiguous()
    after = torch.empty_like(past) if out is None else out
    # kept by name: memory that only a pointer refers to would be freed before the call
    turned = weight.float().T.contiguous()
    offset = None if bias is None else bias.float().contiguous()
    shape, inputs = describe(dense, turned, offset, past, None)
    y = dense.new_empty(dense.shape)
    library().conv_step(
        ctypes.byref(shape), ctypes.byref(inputs), native.pointer(y), native.pointer(after)
    )
    return y.to(x.dtype), after


def beginnings(reset: Tensor, taps: int) -> Tensor:
    """[B, T] the column where each token's document begins; -taps: before this call."""
    column = torch.arange(reset.shape[1], device=reset.device)
    return torch.where(reset, column, -taps).cummax(1).values


def next_window(
    x: Tensor, reach: int, window: Tensor | None, lengths: Tensor | None, reset: Tensor | None
) -> Tensor:
    """The window [B, k - 1, C] of the next call; a call without pads and resets copies little."""
    past = x.new_zeros(len(x), reach, x.shape[2]) if window is None else window.to(x.dtype)
    if lengths is None and reset is None:
        return torch.cat([past[:, x.shape[1] :], x[:, -reach:]], dim=1)
    return last_inputs(torch.cat([past, x], dim=1), reach, lengths, segments(reset, reach))


def describe(
    x: Tensor, weight: Tensor, bias: Tensor | None, window: Tensor | None, start: Tensor | None
) -> tuple[_Shape, _Inputs]:
    """The structs of a call; weight is [taps, channels] here."""
    if len(weight) > MAX_TAPS:
        raise AmorError(
            f"a convolution of {len(weight)} taps; native code takes up to {MAX_TAPS}: "
            "set AMOR_KERNELS=conv=reference"
        )
    tensors = [native.pointer(t) for t in (x, weight, bias, window, start)]
    return _Shape(*x.shape, len(weight), BLOCK), _Inputs(*tensors, x.stride(0), x.stride(1))


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, window: Tensor | None, start: Tensor | None
) -> Tensor:
    """y [B, T, C] without a gradient."""
    shape, inputs = describe(x, weight, bias, window, start)
    y = x.new_empty(x.shape)
    library().conv_forward(
        ctypes.byref(shape), ctypes.byref(inputs), native.pointer(y), native.threads()
    )
    return y


class _ConvFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        window: Tensor | None,
        start: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, bias, window, start)
        return forward(x, weight, bias, window, start)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, window, start = ctx.saved_tensors
        shape, inputs = describe(x, weight, bias, window, start)
        taps, channels = weight.shape
        dy, dx = dy.contiguous(), x.new_empty(x.shape)
        parts = x.new_empty(len(x) * -(-x.shape[1] // BLOCK), taps + 1, channels)
        dwindow = None if window is None else torch.empty_like(window)
        outputs = [native.pointer(t) for t in (dy, dx, parts, dwindow)]
        library().conv_backward(
            ctypes.byref(shape), ctypes.byref(inputs), *outputs, native.threads()
        )
        total = parts.sum(0)
        return dx, total[:-1], None if bias is None else total[-1], dwindow, None
