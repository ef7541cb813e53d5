"""Linear layers in C++ (native.cpp): at the shapes of a training step faster than torch's products.

The gradients of x from several weights are summed where they are formed. Other types than float32,
autocast and the gradient of a weight (where torch's product is the faster) are left to torch, and
so are few tokens without a gradient. With gradients, and inside `each_alone`, a token's numbers
depend neither on those beside it, nor on threads, nor on where tensors lie in memory: torch's
products of one to seven rows round by that, and a training step in which a single token fires must
not.
"""

import ctypes
from collections.abc import Sequence
from ctypes import c_int, c_long, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from amor.ops import native
from amor.ops.linear import alone, reference

SOURCE = Path(__file__).with_suffix(".cpp")
# tokens: below, packing the weights costs more than it gains, at most a millisecond at width 1536
FEW = 64


def missing() -> str | None:
    """Why this backend cannot run here (no compiler, say), or None."""
    return native.missing(SOURCE)


class _Matrix(ctypes.Structure):
    _fields_ = [("p", c_void_p), ("row", c_long), ("col", c_long)]


class _Sides(ctypes.Structure):
    _fields_ = [
        ("a", _Matrix),
        ("b", _Matrix),
        *((name, c_long) for name in ("m", "n", "inner", "row")),
    ]


@cache
def library() -> ctypes.CDLL:
    """The compiled library, its structs checked against those above."""
    loaded = native.library(SOURCE, _Matrix, _Sides)
    loaded.linear.argtypes = [c_void_p, c_void_p, c_int, c_int]
    return loaded


def multiply(out: Tensor, a: Tensor, b: Tensor, add: bool = False) -> Tensor:
    """out = a b, or += where `add`; rows of out are dense, a and b may be transposed."""
    sides = _Sides(
        (a.data_ptr(), *a.stride()),
        (b.data_ptr(), *b.stride()),
        a.shape[0],
        b.shape[1],
        a.shape[1],
        out.stride(0),
    )
    library().linear(ctypes.addressof(sides), out.data_ptr(), add, torch.get_num_threads())
    return out


def linears(x: Tensor, groups: Sequence[Sequence[Tensor]]) -> tuple[Tensor, ...]:
    """As the reference, left to it where that is faster."""
    weights = [w for group in groups for w in group]
    ours = x.dtype == torch.float32 and all(
        w.dtype == x.dtype and w.shape[1:] == x.shape[-1:] for w in weights
    )
    learns = torch.is_grad_enabled() and any(t.requires_grad for t in (x, *weights))
    few = not learns and not alone() and x.numel() < FEW * x.shape[-1]
    if not ours or few or torch.is_autocast_enabled("cpu"):
        return reference.linears(x, groups)
    flat = x.reshape(x.shape[:-1].numel(), x.shape[-1])
    sizes = tuple(len(group) for group in groups)
    results = (
        _LinearFunction.apply(flat, sizes, *weights) if learns else forward(flat, sizes, weights)
    )
    return tuple(y.view(*x.shape[:-1], y.shape[1]) for y in results)


def forward(x: Tensor, sizes: tuple[int, ...], weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The results of groups of `sizes` weights, [N, ...] each, without a gradient."""
    rest, results = iter(weights), []
    for size in sizes:
        group = [next(rest) for _ in range(size)]
        results.append(x.new_empty(len(x), sum(len(w) for w in group)))
        for part, w in zip(results[-1].split([len(w) for w in group], dim=1), group, strict=True):
            multiply(part, x, w.T)
    return tuple(results)


class _LinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, sizes: tuple[int, ...], *weights: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, *weights)
        ctx.set_materialize_grads(False)
        ctx.sizes = sizes
        return forward(x, sizes, weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        wants_x, _, *wants = ctx.needs_input_grad
        dx: Tensor | None = None
        dw: list[Tensor | None] = []
        for dy, size in zip(grads, ctx.sizes, strict=True):
            group = weights[len(dw) : len(dw) + size]
            if dy is None:
                dw += [None] * size
                continue
            for part, w in zip(dy.split([len(w) for w in group], dim=1), group, strict=True):
                if wants_x:
                    dx = multiply(
                        x.new_empty(x.shape) if dx is None else dx, part, w, add=dx is not None
                    )
                dw.append(part.T @ x if wants[len(dw)] else None)
        return dx, None, *dw
