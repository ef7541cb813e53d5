"""The form of a State: which tensors a model's States hold, by which one of another model is refused where it enters.

A step writes into the tensors of a State by native code, so what they are is known before: the model's own `start` says it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

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
