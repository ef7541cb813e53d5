"""From a program (amor/program.py) to native code: packed matrices, and structs that walk.cpp
reads.

A Compiled program is called with input buffers and the tensors of a State; nothing in it depends on
the kind of layer. It is a snapshot of the weights (except float32 matrices, which it shares with
the model), so its owner must notice when they change: amor/decode/fingerprint.py.
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

from amor.decode.tables import RowTables, StateEntries, StateTable, rotary_table
from amor.errors import AmorError
from amor.kv import KV
from amor.layout import Layout, StepLayout
from amor.ops import native
from amor.ops.native import team
from amor.ops.product import Matrix, spend_product
from amor.ops.product.native import Weights
from amor.ops.spent import someone_counts
from amor.ops.spent import spend as spend_on
from amor.program import (
    INSTRUCTIONS,
    AttendOp,
    DeltaOp,
    FireOp,
    HeadOp,
    Instruction,
    ProductOp,
    Program,
    ScanOp,
    StateRef,
    Vector,
)

SOURCE = Path(__file__).with_name("walk.cpp")


class VectorStruct(ctypes.Structure):
    """Where the rows of a vector lie: a caller's buffer, or a place in the scratch memory."""

    _fields_ = [
        (name, c_long) for name in ("buffer", "scratch_offset", "row_stride", "offset", "width")
    ]


class StateTensorStruct(ctypes.Structure):
    """Addresses of a StateTable, and of a RotaryTable for keys."""

    _fields_ = [(name, c_void_p) for name in ("before", "after", "cos", "sin", "capacity")]


class CallStruct(ctypes.Structure):
    """What one call hands to a program: rows, memory, states, and where results go."""

    _fields_ = [
        ("rows", c_long),
        *((name, c_void_p) for name in ("scratch", "inputs", "state", "row", "position", "chains")),
        ("chain_count", c_long),
        *((name, c_void_p) for name in ("logits", "entropy", "counts", "fired")),
        ("blocks", c_long),
        ("widths", c_void_p),
        *((name, c_long) for name in ("input_count", "scratch_size", "speculate")),
    ]


class InstructionStruct(ctypes.Structure):
    """The number of an instruction and its fields."""

    _fields_ = [("kind", c_long), ("fields", c_void_p)]


def _fields(kind: type) -> list[tuple[str, Any]]:
    """The C++ fields of an instruction, by the types of its own."""
    fields: list[tuple[str, Any]] = []
    hints = get_type_hints(kind)
    for field in dataclasses.fields(kind):
        hint = hints[field.name]
        if hint is Vector:
            fields.append((field.name, VectorStruct))
        elif hint is float:
            fields.append((field.name, c_float))
        elif hint in (int, StateRef):
            fields.append((field.name, c_long))
        else:  # a tensor that may be missing, or matrices
            fields.append((field.name, c_void_p))
            if field.name == "layers":
                fields.append(("layers_count" if kind is HeadOp else "count", c_long))
            if field.name == "body":
                fields.append(("length", c_long))
    return fields


STRUCTS: dict[type, type[ctypes.Structure]] = {
    kind: type(
        kind.__name__, (ctypes.Structure,), {"_fields_": _fields(kind), "__module__": __name__}
    )
    for kind in INSTRUCTIONS
}


@cache
def library() -> ctypes.CDLL:
    """walk.cpp, compiled and checked against the structs declared here."""
    kinds = {f"{kind.__name__}.kind": kind.kind for kind in INSTRUCTIONS}
    loaded = native.library(
        SOURCE,
        VectorStruct,
        StateTensorStruct,
        CallStruct,
        InstructionStruct,
        Weights,
        *STRUCTS.values(),
        **kinds,
    )
    joined = team.join(loaded)
    joined.walk.argtypes, joined.walk.restype = [c_void_p, c_long, c_void_p, c_int], c_int
    return joined


Pack = Callable[[Tensor], Matrix]


@dataclass(frozen=True)
class InstructionCost:
    """What one instruction reads and computes, for the counters of amor/ops/spent.py."""

    matrices: tuple[Matrix, ...] = ()
    state_size: int = 0  # numbers of a row's recurrent state
    flops: int = 0  # per number of the state
    window: int = 0  # numbers of a convolution's window
    attends: StateRef | None = None  # the keys it reads


class Compiled:
    """A program ready to run by walk.cpp."""

    def __init__(self, program: Program, pack: Pack):
        self.input_widths, self.scratch_size = (
            [v.width for v in program.inputs],
            program.scratch_size,
        )
        self.widths = (c_long * len(program.inputs))(*self.input_widths)
        self.state_refs: list[StateRef] = []
        self.matrices: list[Matrix] = []
        self.keepalive: list[Any] = []  # memory that structs point to
        self.costs: list[InstructionCost] = []
        self.body_costs: list[list[InstructionCost]] = []  # per FireOp
        self.pack = pack
        structs = [self._struct(step) for step in program.instructions]
        self.keepalive += structs
        self.state = (StateTensorStruct * len(self.state_refs))()
        # the object each struct of `state` was last filled from, and its table
        self.bound: list[Any] = [weakref.ref(self)] * len(self.state_refs)
        self.tables: list[StateTable | None] = [None] * len(self.state_refs)
        self.bound_parts: Sequence[StateEntries] | None = None  # tables that all of it is bound to
        self.lock = threading.Lock()
        self.instructions = (InstructionStruct * len(structs))(
            *(
                InstructionStruct(step.kind, ctypes.addressof(s))
                for step, s in zip(program.instructions, structs, strict=True)
            )
        )
        library()

    def _struct(self, step: Instruction) -> ctypes.Structure:
        values: list[Any] = []
        first = len(self.matrices)
        for field in dataclasses.fields(step):
            value = getattr(step, field.name)
            if isinstance(value, Vector):
                values.append(
                    VectorStruct(
                        value.buffer,
                        value.scratch_offset,
                        value.row_stride,
                        value.offset,
                        value.width,
                    )
                )
            elif isinstance(value, StateRef):
                values.append(self._place(value))
            elif field.name == "body":
                values += self._body(value)
            elif isinstance(value, tuple):
                values += self._layers(value)
            elif isinstance(value, Tensor):
                self.keepalive.append(value.detach().float().contiguous())
                values.append(self.keepalive[-1].data_ptr())
            else:
                values.append(value)
        matrices = () if isinstance(step, FireOp) else tuple(self.matrices[first:])
        self.costs.append(_cost(step, matrices))
        return STRUCTS[type(step)](*values)

    def _body(self, body: Sequence[Instruction]) -> list[Any]:
        """The instructions for rows that fire; their costs are kept apart."""
        outer, self.costs = self.costs, []
        structs = [self._struct(step) for step in body]
        self.body_costs.append(self.costs)
        self.costs = outer
        array = (InstructionStruct * len(structs))(
            *(InstructionStruct(step.kind, ctypes.addressof(s)) for step, s in zip(body, structs))
        )
        self.keepalive += [*structs, array]
        return [ctypes.addressof(array), len(structs)]

    def _place(self, ref: StateRef) -> int:
        if ref not in self.state_refs:
            self.state_refs.append(ref)
        return self.state_refs.index(ref)

    def _layers(self, layers: Sequence[nn.Linear]) -> list[Any]:
        packed = [self.pack(layer.weight) for layer in layers]
        self.matrices += packed
        self.keepalive.append((Weights * len(packed))(*(Weights.of(m) for m in packed)))
        return [ctypes.addressof(self.keepalive[-1]), len(packed)]

    def __call__(
        self,
        inputs: Sequence[Tensor],
        parts: Sequence[StateEntries] = (),
        layout: Layout | None = None,
        rows: Tensor | None = None,
        steps: tuple[int, int] | None = None,
        results: Sequence[Tensor] = (),
        speculate: bool = False,
    ) -> None:
        """Run the program for one token per row.

        inputs: [rows, width] each, dense float32; some are outputs of the program.
        parts: of the State; recurrent tensors are overwritten, keys and values go into free slots.
        layout: of the whole batch; a `StepLayout` whose rows may be tokens of the same text.
        rows: [rows] indices into the batch; None: all of it.
        steps: (first, end) of the instructions to run; None: all.
        results: of a program that reads the head: logits [rows, V], entropies [rows] in nats, int64
        counts [2] of passes and vectors, which are added to, and decisions [rows, K], bool.
        speculate: run the blocks after one that fired ahead, as if they fired too.
        """
        count = inputs[0].shape[0]
        for t, width in zip(inputs, self.input_widths, strict=True):
            assert t.shape == (count, width) and t.is_contiguous() and t.dtype == torch.float32, (
                t.shape,
                count,
                width,
            )
        scratch = torch.empty(count * self.scratch_size)
        keepalive: list[Any] = [scratch]
        with self.lock:  # another thread may step another session
            batch = 0 if layout is None else layout.start.shape[0]
            if parts is not self.bound_parts:
                for index, ref in enumerate(self.state_refs):
                    self._bind(index, ref, parts, batch)
                self.bound_parts = parts if isinstance(parts, RowTables) else None
            keepalive += self.tables
            self._turn(layout, keepalive)
            state = type(self.state).from_buffer_copy(self.state)
        pointers = (c_void_p * len(inputs))(*(t.data_ptr() for t in inputs))
        row = position = chains = None
        chain_count = 0
        if isinstance(layout, StepLayout) and layout.chains is not None and rows is None:
            chains, chain_count = layout.chains.data_ptr(), len(layout.chains) - 1
        if layout is not None:
            numbers = _all_rows(batch) if rows is None else rows.contiguous()
            positions = layout.start.contiguous() if rows is None else layout.start[rows]
            keepalive += [numbers, positions]
            row, position = numbers.data_ptr(), positions.data_ptr()
        call = CallStruct(
            *(count, scratch.data_ptr(), ctypes.addressof(pointers), ctypes.addressof(state)),
            *(row, position, chains, chain_count),
            *(t.data_ptr() for t in results),
            *(None for _ in range(4 - len(results))),
            len(self.body_costs),
            *(ctypes.addressof(self.widths), len(inputs), self.scratch_size, speculate),
        )
        first, last = steps or (0, len(self.instructions))
        if someone_counts():
            self.spend(self.costs[first:last], count, layout, rows)
        begin = ctypes.addressof(self.instructions) + first * ctypes.sizeof(InstructionStruct)
        if library().walk(begin, last - first, ctypes.addressof(call), torch.get_num_threads()):
            assert layout is not None
            raise AmorError(
                f"positions {layout.start.tolist()} lie outside the slots of the state; is it of "
                "this batch?"
            )

    def _bind(
        self,
        index: int,
        ref: StateRef,
        parts: Sequence[StateEntries],
        rows: int,
    ) -> None:
        """Point struct `index` at an entry of the state; refuse one that the program cannot use.

        A session hands in the same entries at every step, so one that is bound already is not
        checked again.
        """
        entry, struct, table = parts[ref.part].get(ref.name), self.state[index], self.tables[index]
        owner = entry.buffer if isinstance(entry, KV) else entry
        if table is None or owner is not self.bound[index]() or len(table.before) != rows:
            table = entry if isinstance(entry, StateTable) else self._table(ref, entry, rows)
            self.bound[index], self.tables[index] = weakref.ref(owner), table
            struct.before, struct.after = table.before.data_ptr(), table.after.data_ptr()
            struct.capacity = None if table.capacity is None else table.capacity.data_ptr()

    def _turn(self, layout: Layout | None, keepalive: list[Any]) -> None:
        """Point structs of keys at cosines and sines of every position up to the largest."""
        for index, ref in enumerate(self.state_refs):
            if ref.theta and layout is not None:
                turns = rotary_table(ref.shape[1], ref.theta, layout.max_position)
                keepalive.append(turns)
                self.state[index].cos, self.state[index].sin = turns.addresses

    def _table(self, ref: StateRef, entry: Tensor | KV | None, rows: int) -> StateTable:
        """The table of an entry of a State of `rows` rows."""
        tensors = (entry.buffer.k, entry.buffer.v) if isinstance(entry, KV) else (entry,)
        shape = [list(t.shape) if isinstance(t, Tensor) else type(t).__name__ for t in tensors]
        want = [rows, *ref.shape]
        if ref.theta:
            want.insert(2, entry.buffer.capacity if isinstance(entry, KV) else -1)
        if (
            entry is None
            or isinstance(entry, KV) != bool(ref.theta)
            or any(each != want for each in shape)
        ):
            raise AmorError(
                f"state {ref.name!r} has shape {shape[0]}, this step needs {want}; "
                "is it of another model?"
            )
        for t in (entry.buffer.k, entry.buffer.v) if isinstance(entry, KV) else (entry,):
            if not t.is_contiguous() or t.dtype != torch.float32 or t.device.type != "cpu":
                raise AmorError(
                    f"state {ref.name!r} is {t.dtype} on {t.device}; compiled steps need dense "
                    "float32 on cpu, which State.reserve gives keys and values"
                )
        return StateTable.of(entry, rows)

    def spend(
        self,
        costs: Sequence[InstructionCost],
        rows: int,
        layout: Layout | None,
        which: Tensor | None,
    ) -> None:
        """Count the work of some instructions, for all rows of a layout or `which` of them."""
        for cost in costs:
            for matrix in cost.matrices:
                spend_product("products", rows, matrix)
            if cost.flops:
                spend_on(
                    "recurrence", cost.flops * cost.state_size * rows, 4 * rows * cost.state_size
                )
            if cost.window:
                spend_on("recurrence", 0, 4 * rows * cost.window)
            if cost.attends is not None and layout is not None:
                keys = int((layout.start if which is None else layout.start[which]).sum()) + rows
                numbers = keys * math.prod(cost.attends.shape)
                spend_on("attention", 4 * numbers, 2 * 4 * numbers)


@cache
def _all_rows(count: int) -> Tensor:
    """[count] 0, 1, ...: only read."""
    return torch.arange(count)


def _cost(step: Instruction, matrices: tuple[Matrix, ...]) -> InstructionCost:
    if isinstance(step, ProductOp):
        return InstructionCost(matrices)
    if isinstance(step, ScanOp):  # decay and feed, and read out
        return InstructionCost(state_size=math.prod(step.state.shape), flops=4)
    if isinstance(step, DeltaOp):  # the same, and the value stored under a key
        return InstructionCost(state_size=math.prod(step.state.shape), flops=6)
    if isinstance(step, AttendOp):
        return InstructionCost(attends=step.kv)
    window = getattr(step, "window", None)
    return (
        InstructionCost(window=math.prod(window.shape)) if window is not None else InstructionCost()
    )
