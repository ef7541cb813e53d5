"""From a program (amor/program.py) to native code: matrices packed in a format, instructions as structs that walk.cpp reads.

A Compiled program is called with memory and the state's tensors; it knows no layer by name. What it holds is a snapshot of the
weights (float32 matrices excepted, which it shares with the model), so whoever compiled it must notice when they change:
amor/decode/seal.py.
"""

from __future__ import annotations

import ctypes
import dataclasses
import math
import threading
import weakref
from collections.abc import Callable, Sequence
from ctypes import c_float, c_int, c_long, c_void_p
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

import torch
from torch import Tensor, nn

from amor.errors import AmorError
from amor.form import Part
from amor.kv import KV
from amor.layout import Layout
from amor.ops import native
from amor.ops.native import team
from amor.ops.product import Matrix, spend_product
from amor.ops.product.native import Weights
from amor.ops.spent import someone_counts, spend
from amor.program import INSTRUCTIONS, Attend, Delta, Held, Instruction, Product, Program, Scan, Vector

SOURCE = Path(__file__).with_name("walk.cpp")


class VectorStruct(ctypes.Structure):
    _fields_ = [(name, c_long) for name in ("where", "offset", "of", "start", "width")]


class HeldStruct(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("p", "v", "cos", "sin")),
        *((name, c_long) for name in ("row", "head", "capacity")),
    ]


class CallStruct(ctypes.Structure):
    _fields_ = [("rows", c_long), *((name, c_void_p) for name in ("room", "given", "held", "row", "at"))]


class StepStruct(ctypes.Structure):
    _fields_ = [("kind", c_long), ("what", c_void_p)]


def _fields(kind: type) -> list[tuple[str, Any]]:
    """The C++ fields of an instruction, by the types of its own."""
    fields: list[tuple[str, Any]] = []
    hints = get_type_hints(kind)
    for field in dataclasses.fields(kind):
        wanted = hints[field.name]
        if wanted is Vector:
            fields.append((field.name, VectorStruct))
        elif wanted is float:
            fields.append((field.name, c_float))
        elif wanted in (int, Held):
            fields.append((field.name, c_long))
        else:  # a tensor that may be missing, or matrices
            fields.append((field.name, c_void_p))
            fields += [("count", c_long)] if field.name == "layers" else []
    return fields


STRUCTS: dict[type, type[ctypes.Structure]] = {
    kind: type(kind.__name__, (ctypes.Structure,), {"_fields_": _fields(kind), "__module__": __name__}) for kind in INSTRUCTIONS
}


@cache
def library() -> ctypes.CDLL:
    kinds = {f"{kind.__name__}.kind": kind.kind for kind in INSTRUCTIONS}
    loaded = native.library(SOURCE, VectorStruct, HeldStruct, CallStruct, StepStruct, Weights, *STRUCTS.values(), **kinds)
    found = team.join(loaded)
    found.walk.argtypes, found.walk.restype = [c_void_p, c_long, c_void_p, c_int], c_int
    return found


Pack = Callable[[Tensor], Matrix]


@dataclass(frozen=True)
class Spent:
    """What an instruction spends: a matrix a row, or a recurrent state of some numbers and FLOPs each."""

    matrices: tuple[Matrix, ...] = ()
    numbers: int = 0
    flops: int = 0
    window: int = 0
    attends: Held | None = None


class Compiled:
    """A program ready to run."""

    def __init__(self, program: Program, pack: Pack):
        self.given, self.room = [v.width for v in program.given], program.room
        self.held: list[Held] = []
        self.matrices: list[Matrix] = []
        self.kept: list[Any] = []  # memory that structs point to
        self.spent: list[Spent] = []
        self.pack = pack
        structs = [self._struct(step) for step in program.steps]
        self.kept += structs
        self.memory = (HeldStruct * len(self.held))()
        self.met: list[Any] = [weakref.ref(self)] * len(self.held)  # what each of them points to
        self.lock = threading.Lock()
        self.steps = (StepStruct * len(structs))(
            *(StepStruct(step.kind, ctypes.addressof(s)) for step, s in zip(program.steps, structs, strict=True))
        )
        library()

    def _struct(self, step: Instruction) -> ctypes.Structure:
        values: list[Any] = []
        first = len(self.matrices)
        for field in dataclasses.fields(step):
            value = getattr(step, field.name)
            if isinstance(value, Vector):
                values.append(VectorStruct(value.where, value.offset, value.of, value.start, value.width))
            elif isinstance(value, Held):
                values.append(self._place(value))
            elif isinstance(value, tuple):
                values += self._layers(value)
            elif isinstance(value, Tensor):
                self.kept.append(value.detach().float().contiguous())
                values.append(self.kept[-1].data_ptr())
            else:
                values.append(value)
        self.spent.append(_spent(step, tuple(self.matrices[first:])))
        return STRUCTS[type(step)](*values)

    def _place(self, held: Held) -> int:
        if held not in self.held:
            self.held.append(held)
        return self.held.index(held)

    def _layers(self, layers: Sequence[nn.Linear]) -> list[Any]:
        packed = [self.pack(layer.weight) for layer in layers]
        self.matrices += packed
        self.kept.append((Weights * len(packed))(*(Weights.of(m) for m in packed)))
        return [ctypes.addressof(self.kept[-1]), len(packed)]

    def __call__(
        self,
        given: Sequence[Tensor],  # [rows, width] each, dense float32; written where the program says so
        parts: Sequence[Part] = (),  # of the state: recurrent tensors are written over, keys and values into free slots
        layout: Layout | None = None,  # of the whole batch
        rows: Tensor | None = None,  # which rows of the batch these are; None: all
        steps: tuple[int, int] | None = None,  # from, to: some instructions only
    ) -> None:
        count = given[0].shape[0]
        for t, width in zip(given, self.given, strict=True):
            assert t.shape == (count, width) and t.is_contiguous() and t.dtype == torch.float32, (t.shape, count, width)
        room = torch.empty(count * self.room)
        keep: list[Any] = [room]
        with self.lock:  # another thread may step another session
            batch = 0 if layout is None else layout.start.shape[0]
            for index, one in enumerate(self.held):
                self._memory(index, one, parts, layout, batch, keep)
            held = type(self.memory).from_buffer_copy(self.memory)
        memory = (c_void_p * len(given))(*(t.data_ptr() for t in given))
        row = at = None
        if layout is not None:
            whole = _all_rows(batch) if rows is None else rows.contiguous()
            places = layout.start.contiguous() if rows is None else layout.start[rows]
            keep += [whole, places]
            row, at = whole.data_ptr(), places.data_ptr()
        call = CallStruct(count, room.data_ptr(), ctypes.addressof(memory), ctypes.addressof(held), row, at)
        first, last = steps or (0, len(self.steps))
        if someone_counts():
            self._spend(count, layout, rows, first, last)
        begin = ctypes.addressof(self.steps) + first * ctypes.sizeof(StepStruct)
        if library().walk(begin, last - first, ctypes.addressof(call), torch.get_num_threads()):
            assert layout is not None
            raise AmorError(f"positions {layout.start.tolist()} lie outside the slots of the state; is it of this batch?")

    def _memory(self, index: int, held: Held, parts: Sequence[Part], layout: Layout | None, rows: int, keep: list[Any]) -> None:
        """Where a tensor of the state lies, refused before native code sees it where it is not what the program needs.

        A session hands in the same memory step after step, so what was looked at the last time is not looked at again.
        """
        assert layout is not None
        found, struct = parts[held.part].get(held.name), self.memory[index]
        if held.theta:
            memory = found.buffer if isinstance(found, KV) else None
            if memory is None or memory is not self.met[index]() or memory.k.shape[0] != rows:
                self.memory[index], self.met[index] = self._keys(held, found, rows), weakref.ref(memory)
            struct.cos, struct.sin = self._turns(held, layout, keep)
        elif not isinstance(found, Tensor) or found is not self.met[index]() or found.shape[0] != rows:
            struct.p, self.met[index] = self._recurrent(held, found, rows), weakref.ref(found)

    def _turns(self, held: Held, layout: Layout, keep: list[Any]) -> tuple[int, int]:
        """Cosines and sines of each row's position, [rows, size / 2] dense."""
        cos, sin = layout.rotary(held.shape[1], held.theta)  # [rows, 1, size / 2]: as good as dense
        keep += [cos, sin]
        return cos.data_ptr(), sin.data_ptr()

    def _recurrent(self, held: Held, found: object, rows: int) -> int:
        want = (rows, *held.shape)
        if not isinstance(found, Tensor) or found.shape != want:
            shape = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise AmorError(f"state {held.name!r} has shape {shape}, this step needs {list(want)}; is it of another model?")
        if found.dtype != torch.float32 or not found.is_contiguous() or found.device.type != "cpu":
            raise AmorError(f"state {held.name!r} is {found.dtype} on {found.device}; compiled steps need dense float32 on cpu")
        return found.data_ptr()

    def _keys(self, held: Held, found: object, rows: int) -> HeldStruct:
        heads, size = held.shape
        if not isinstance(found, KV) or found.buffer.k.shape[:2] != (rows, heads) or found.buffer.k.shape[3] != size:
            shape = list(found.buffer.k.shape) if isinstance(found, KV) else type(found).__name__
            raise AmorError(f"keys have shape {shape}, this step needs {[rows, heads, '...', size]}; of another model?")
        k, v = found.buffer.k, found.buffer.v
        dense = k.stride() == v.stride() and k.stride()[2:] == (size, 1) and k.shape == v.shape
        if not dense or not k.dtype == v.dtype == torch.float32 or k.device.type != "cpu":
            raise AmorError(
                "a compiled step needs keys and values in float32 on cpu, a head's in one piece; State.reserve makes them so"
            )
        return HeldStruct(k.data_ptr(), v.data_ptr(), None, None, *k.stride()[:2], found.buffer.capacity)

    def _spend(self, rows: int, layout: Layout | None, which: Tensor | None, first: int, last: int) -> None:
        for one in self.spent[first:last]:
            for matrix in one.matrices:
                spend_product("products", rows, matrix)
            if one.flops:
                spend("recurrence", one.flops * one.numbers * rows, 4 * rows * one.numbers)
            if one.window:
                spend("recurrence", 0, 4 * rows * one.window)
            if one.attends is not None and layout is not None:
                seen = int((layout.start if which is None else layout.start[which]).sum()) + rows
                numbers = seen * math.prod(one.attends.shape)
                spend("attention", 4 * numbers, 2 * 4 * numbers)


@cache
def _all_rows(count: int) -> Tensor:
    """[count] 0, 1, ...: only read."""
    return torch.arange(count)


def _spent(step: Instruction, matrices: tuple[Matrix, ...]) -> Spent:
    if isinstance(step, Product):
        return Spent(matrices)
    if isinstance(step, Scan):  # decay and feed, and read out
        return Spent(numbers=math.prod(step.state.shape), flops=4)
    if isinstance(step, Delta):  # the same, and what the state holds of a key
        return Spent(numbers=math.prod(step.state.shape), flops=6)
    if isinstance(step, Attend):
        return Spent(attends=step.kv)
    window = getattr(step, "window", None)
    return Spent(window=math.prod(window.shape)) if window is not None else Spent()
