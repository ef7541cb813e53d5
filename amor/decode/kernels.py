"""The C++ of one decode step (step.cpp): layers are described once, then each call hands over memory."""

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, c_float, c_int, c_long, c_void_p
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from amor.errors import AmorError
from amor.ops import native
from amor.ops.product import Matrix

SOURCE = Path(__file__).with_name("step.cpp")


class Weights(ctypes.Structure):
    _fields_ = [("weight", c_void_p), ("scales", c_void_p), ("outputs", c_long), ("inner", c_long)]

    @classmethod
    def of(cls, matrix: Matrix) -> "Weights":
        scales = None if matrix.scales is None else matrix.scales.data_ptr()
        return cls(matrix.weight.data_ptr(), scales, matrix.outputs, matrix.inner)


class Mamba2Shape(ctypes.Structure):
    _fields_ = [
        *((name, c_long) for name in ("heads", "size", "groups", "width", "reach")),
        *((name, c_void_p) for name in ("taps", "bias", "dt_bias", "A", "D", "weight")),
        ("eps", c_float),
    ]


class DeltaShape(ctypes.Structure):
    _fields_ = [
        *((name, c_long) for name in ("heads", "size", "value", "reach")),
        *((name, c_void_p) for name in ("taps", "dt_bias", "A", "weight")),
        ("eps", c_float),
    ]


class Layer(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("norm", "mlp_norm")),
        *((name, c_float) for name in ("eps", "mlp_eps")),
        ("mamba2", POINTER(Mamba2Shape)),
        ("delta", POINTER(DeltaShape)),
        ("count", c_long),
        ("into", Weights * 6),
        *((name, Weights) for name in ("out", "gate", "up", "down")),
        *((name, c_void_p) for name in ("window", "state")),
    ]


class Slots(ctypes.Structure):
    _fields_ = [
        *((name, Weights) for name in ("k_proj", "v_proj")),
        *((name, c_long) for name in ("rows", "heads", "size", "row", "head", "capacity")),
        *((name, c_void_p) for name in ("x", "cos", "sin", "at", "k", "v")),
    ]


@cache
def library() -> ctypes.CDLL:
    found = native.library(SOURCE)
    found.norm.argtypes = [c_void_p, c_void_p, c_long, c_long, c_float, c_void_p]
    found.norms.argtypes = [c_void_p, c_void_p, c_void_p, c_long, c_long, c_long, c_void_p]
    found.swiglu.argtypes = [c_void_p, c_long, c_long, c_void_p]
    found.walk.argtypes = [c_void_p, c_long, c_long, c_long, c_void_p, c_int]
    found.mixed.argtypes = [c_void_p, c_long, c_long, c_void_p, c_void_p, c_int]
    found.remember.argtypes, found.remember.restype = [c_void_p, c_long, c_int], c_int
    return found


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm of x [R, n]."""
    out = torch.empty_like(x)
    library().norm(x.data_ptr(), weight.data_ptr(), *x.shape, eps, out.data_ptr())
    return out


def norms(x: Tensor, every: Sequence[tuple[Tensor, float] | None]) -> Tensor:
    """[norms, R, n]: x [R, n] by each RMS norm of a weight and eps, or as it is."""
    out = torch.empty(len(every), *x.shape)
    weights = (c_void_p * len(every))(*(one and one[0].data_ptr() for one in every))
    eps = (c_float * len(every))(*(one[1] if one else 0.0 for one in every))
    library().norms(x.data_ptr(), weights, eps, len(every), *x.shape, out.data_ptr())
    return out


def swiglu(both: Tensor) -> Tensor:
    """silu(gate) * up of [R, 2 n]."""
    out = torch.empty(len(both), both.shape[1] // 2)
    library().swiglu(both.data_ptr(), *out.shape, out.data_ptr())
    return out


def walk(layers: ctypes.Array, h: Tensor) -> None:
    """h [R, D] through layers, in place; their windows and states too."""
    library().walk(layers, len(layers), *h.shape, h.data_ptr(), torch.get_num_threads())


def mixed(layer: Layer, x: Tensor) -> Tensor:
    """The mixer of one layer alone, of x [R, D]; window and state in place."""
    out = torch.empty_like(x)
    library().mixed(ctypes.addressof(layer), *x.shape, x.data_ptr(), out.data_ptr(), torch.get_num_threads())
    return out


def remember(every: Sequence[Slots]) -> None:
    """Keys, turned, and values of new tokens into the room of several attentions."""
    if library().remember((Slots * len(every))(*every), len(every), torch.get_num_threads()):
        capacities = sorted({slots.capacity for slots in every})
        raise AmorError(f"positions lie outside the {capacities} slots of the state; is it of this batch?")
