"""The C++ of one decode step (step.cpp): shapes and weights are described once, then each call hands over memory."""

import ctypes
from ctypes import c_float, c_int, c_long, c_void_p
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from amor.ops import native
from amor.ops.spent import spend

SOURCE = Path(__file__).with_name("step.cpp")
FLOPS = {"mamba2": 4, "delta": 6}  # a number of the recurrent state: decay and feed, and read out; twice for delta


class Mamba2Shape(ctypes.Structure):
    _fields_ = [
        *((name, c_long) for name in ("rows", "heads", "size", "groups", "width", "reach")),
        *((name, c_void_p) for name in ("taps", "bias", "dt_bias", "A", "D", "weight")),
        ("eps", c_float),
    ]


class DeltaShape(ctypes.Structure):
    _fields_ = [
        *((name, c_long) for name in ("rows", "heads", "size", "value", "reach")),
        *((name, c_void_p) for name in ("taps", "dt_bias", "A", "weight")),
        ("eps", c_float),
    ]


@cache
def library() -> ctypes.CDLL:
    found = native.library(SOURCE)
    found.norm.argtypes = [c_void_p, c_void_p, c_long, c_long, c_float, c_void_p]
    found.swiglu.argtypes = [c_void_p, c_long, c_long, c_void_p]
    for name in ("mamba2", "delta"):
        getattr(found, name).argtypes = [c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_int]
    return found


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm of x [R, n]."""
    out = torch.empty_like(x)
    library().norm(x.data_ptr(), weight.data_ptr(), *x.shape, eps, out.data_ptr())
    return out


def swiglu(both: Tensor) -> Tensor:
    """silu(gate) * up of [R, 2 n]."""
    out = torch.empty(len(both), both.shape[1] // 2)
    library().swiglu(both.data_ptr(), *out.shape, out.data_ptr())
    return out


def recur(name: str, shape: ctypes.Structure, projected: Tensor, window: Tensor, state: Tensor, width: int) -> Tensor:
    """A recurrent mixer between its projections, window and state updated in place."""
    spend("recurrence", FLOPS[name] * state.numel(), state.nbytes + window.nbytes)
    out = torch.empty(len(projected), width)
    shape.rows = len(projected)
    memory = (t.data_ptr() for t in (projected, window, state, out))
    getattr(library(), name)(ctypes.addressof(shape), *memory, torch.get_num_threads())
    return out
