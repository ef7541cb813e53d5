"""The form of a State: which tensors a model's States hold, by which one of another model is refused where it enters.

A step writes into the tensors of a State by native code, so what they are is known before: the model's own `start` says it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from amor.kv import KV

Part = dict[str, Tensor | KV]  # what one layer or block remembers, by name
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True)
class Held:
    """What one thing of a part is, however many rows there are and however much they have read."""

    keys: bool  # keys and values, not a recurrent tensor
    shape: tuple[int, ...]  # without rows; of keys and values their heads and size
    dtype: torch.dtype
    device: torch.device

    def __str__(self) -> str:
        what = "keys and values of heads and size" if self.keys else "a tensor of"
        return f"{what} {list(self.shape)} in {str(self.dtype).removeprefix('torch.')} on {self.device}"


@dataclass(frozen=True)
class Form:
    parts: tuple[Mapping[str, Held], ...]  # one a layer, then one a block

    def differs(self, other: Form) -> str:
        """What another form has that does not fit this one, or nothing."""
        if len(self.parts) != len(other.parts):
            return f"it is of {len(other.parts)} layers and blocks, not {len(self.parts)}"
        for index, (mine, theirs) in enumerate(zip(self.parts, other.parts, strict=True)):
            if mine.keys() != theirs.keys():
                return f"part {index} holds {_names(theirs)}, not {_names(mine)}"
            for name, held in theirs.items():
                if not _fits(mine[name], held):
                    return f"{name!r} of part {index} is {held}, not {mine[name]}"
        return ""


def _names(part: Mapping[str, Held]) -> str:
    return ", ".join(sorted(part)) or "nothing"


def _fits(wanted: Held, held: Held) -> bool:
    if (wanted.keys, wanted.shape, wanted.device) != (held.keys, held.shape, held.device):
        return False
    if torch.is_autocast_enabled(held.device.type):  # operators choose their own numbers then
        return held.dtype in FLOATS
    # a step keeps recurrent tensors in float32, whatever the model is in
    return held.dtype == wanted.dtype or (not held.keys and held.dtype == torch.float32)


def form_of(parts: Sequence[Part]) -> Form:
    return Form(tuple({name: _held(held) for name, held in part.items()} for part in parts))


def _held(held: Tensor | KV) -> Held:
    t = held.buffer.k if isinstance(held, KV) else held
    shape = (*t.shape[1:2], *t.shape[3:]) if isinstance(held, KV) else t.shape[1:]
    return Held(isinstance(held, KV), tuple(shape), t.dtype, t.device)


def misshapen(held: Tensor | KV, rows: int, longest: int) -> str:
    """How one thing of a part cannot be of this many rows that have read at most this many tokens, or nothing."""
    for t in (held.buffer.k, held.buffer.v) if isinstance(held, KV) else (held,):
        if t.dtype not in FLOATS:
            return f"is {t.dtype}, not a floating-point number"
        if t.shape[:1] != (rows,):
            return f"has shape {list(t.shape)}, but there are {rows} rows"
    if not isinstance(held, KV):
        return ""
    k, v = held.buffer.k, held.buffer.v
    if k.ndim != 4 or k.shape != v.shape or k.dtype != v.dtype:
        keys, values = (f"{t.dtype} of shape {list(t.shape)}" for t in (k, v))
        return f"has keys {keys} and values {values}, not both [rows, heads, slots, size]"
    if not longest <= held.used <= held.buffer.capacity:
        return f"has {held.used} slots of {held.buffer.capacity}, but a row has read {longest} tokens"
    return ""
