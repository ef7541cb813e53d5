"""Tables that compiled steps read: where the state of each row lies, and rotary angles.

Addresses instead of one batch of tensors, so that rows need not be neighbours in memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from amor.kv import KV
from amor.layout import frequencies


@dataclass(frozen=True)
class StateTable:
    """Where one entry of the State lies in memory, per row: rows need not be neighbours."""

    before: Tensor  # [B] int64 addresses: the recurrent tensor that is read, or keys
    after: Tensor  # [B] the recurrent tensor that is written (may be the same), or values
    capacity: Tensor | None = None  # [B] tokens for which keys [heads, capacity, size] have memory

    @staticmethod
    def of(entry: Tensor | KV, rows: int) -> StateTable:
        """The table of one entry of a State, whose rows are dense float32."""
        index = torch.arange(rows)
        if isinstance(entry, Tensor):
            places = entry.data_ptr() + index * (4 * entry[0].numel())
            return StateTable(places, places)
        k, v = entry.buffer.k, entry.buffer.v
        keys, values = (t.data_ptr() + index * (4 * t.stride(0)) for t in (k, v))
        return StateTable(keys, values, torch.full((rows,), entry.buffer.capacity))


class RowTables(list[dict[str, StateTable]]):
    """The tables of all parts of the State, which do not change while this list is in use."""


# the entries of one layer's or block's part of a State, as compiled code takes them
StateEntries = Mapping[str, Tensor | KV | StateTable]


class RotaryTable:
    """Cosines and sines of the positions 0, 1, ..., [positions, size / 2] in float32."""

    def __init__(self, size: int, theta: float, positions: int):
        angles = torch.arange(positions)[:, None].float() * frequencies(size, theta, CPU)
        self.cos, self.sin, self.positions = angles.cos(), angles.sin(), positions
        self.addresses = self.cos.data_ptr(), self.sin.data_ptr()


CPU = torch.device("cpu")
_rotary_tables: dict[tuple[int, float], RotaryTable] = {}


def rotary_table(size: int, theta: float, last: int) -> RotaryTable:
    """A table that holds the position `last`, shared by all models of a head size and theta."""
    table = _rotary_tables.get((size, theta))
    if table is None or table.positions <= last:
        table = RotaryTable(size, theta, max(1024, 2 * (last + 1)))
        _rotary_tables[size, theta] = table
    return table
