"""Which tensors a model's States hold, so that a State of another model is refused where it enters.

A decode step writes into the tensors of a State by native code, so their shapes are checked before:
the model's own `start` gives the specification.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from amor.kv import KV

Part = dict[str, Tensor | KV]  # the state of one layer or block, by name
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True)
class TensorSpec:
    """Shape, dtype and device of one entry of a Part, for any number of rows and tokens read."""

    keys: bool  # keys and values, not a recurrent tensor
    shape: tuple[int, ...]  # without rows; of keys and values [heads, head size]
    dtype: torch.dtype
    device: torch.device

    def __str__(self) -> str:
        what = "keys and values of heads and size" if self.keys else "a tensor of"
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{what} {list(self.shape)} in {dtype} on {self.device}"

    def accepts(self, other: TensorSpec) -> bool:
        """Whether a model that expects this can read on from the other."""
        if (self.keys, self.shape, self.device) != (other.keys, other.shape, other.device):
            return False
        if torch.is_autocast_enabled(other.device.type):  # operators choose their own dtypes then
            return other.dtype in FLOATS
        # a decode step keeps recurrent tensors in float32, whatever the model is in
        return other.dtype == self.dtype or (not other.keys and other.dtype == torch.float32)


@dataclass(frozen=True)
class StateSpec:
    """The TensorSpecs of a whole State."""

    parts: tuple[Mapping[str, TensorSpec], ...]  # one per layer, then one per block

    def mismatch(self, other: StateSpec) -> str:
        """How a State of the other specification does not fit this one, or ""."""
        if len(self.parts) != len(other.parts):
            return f"it is of {len(other.parts)} layers and blocks, not {len(self.parts)}"
        for index, (mine, theirs) in enumerate(zip(self.parts, other.parts, strict=True)):
            if mine.keys() != theirs.keys():
                return f"part {index} holds {_names(theirs)}, not {_names(mine)}"
            for name, spec in theirs.items():
                if not mine[name].accepts(spec):
                    return f"{name!r} of part {index} is {spec}, not {mine[name]}"
        return ""


def _names(part: Mapping[str, TensorSpec]) -> str:
    return ", ".join(sorted(part)) or "nothing"


def spec_of(parts: Sequence[Part]) -> StateSpec:
    """The specification of a State's parts."""
    return StateSpec(
        tuple({name: _tensor_spec(entry) for name, entry in part.items()} for part in parts)
    )


def _tensor_spec(entry: Tensor | KV) -> TensorSpec:
    t = entry.buffer.k if isinstance(entry, KV) else entry
    shape = (*t.shape[1:2], *t.shape[3:]) if isinstance(entry, KV) else t.shape[1:]
    return TensorSpec(isinstance(entry, KV), tuple(shape), t.dtype, t.device)


def shape_error(entry: Tensor | KV, rows: int, max_position: int) -> str:
    """Why an entry cannot be of `rows` rows that have read at most `max_position` tokens, or ""."""
    for t in (entry.buffer.k, entry.buffer.v) if isinstance(entry, KV) else (entry,):
        if t.dtype not in FLOATS:
            return f"is {t.dtype}, not a floating-point number"
        if t.shape[:1] != (rows,):
            return f"has shape {list(t.shape)}, but there are {rows} rows"
    if not isinstance(entry, KV):
        return ""
    k, v = entry.buffer.k, entry.buffer.v
    if k.ndim != 4 or k.shape != v.shape or k.dtype != v.dtype:
        keys, values = (f"{t.dtype} of shape {list(t.shape)}" for t in (k, v))
        return f"has keys {keys} and values {values}, not both [rows, heads, slots, size]"
    if not max_position <= entry.used <= entry.buffer.capacity:
        slots = f"{entry.used} slots of {entry.buffer.capacity}"
        return f"has {slots}, but a row has read {max_position} tokens"
    return ""
