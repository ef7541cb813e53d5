"""The keys and values of one attention, a value that grows in place where it can.

They grow inside a shared buffer, so that reading on does not copy them. The State of the newest
version appends in place; for any other the buffer is copied first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from amor.errors import AmorError
from amor.layout import Layout


class Buffer:
    """Memory for keys and values, [B, H, capacity, size] each, with a version and an epoch.

    Several States may share one buffer, each with the version and epoch it was made at. Say A has
    read 10 tokens and B grew from it by one: B's key stands in slot 10, behind all that A may look
    at, so both stay right. If A now reads another token, slot 10 is taken; A's version is not the
    newest, so its keys are copied to a buffer of its own first. A rollback cuts B back to 9 tokens
    and will write over slot 9, which A still looks at: the epoch is incremented, and A is refused
    from then on.
    """

    def __init__(self, k: Tensor, v: Tensor):
        self.k, self.v = k, v
        # incremented by every append; only the State of the newest version may append in place
        self.version = 0
        self.epoch = 0  # incremented by every rollback; a State that was rolled back is refused

    @property
    def capacity(self) -> int:
        """Slots there is memory for."""
        return self.k.shape[2]


@dataclass(frozen=True)
class KV:
    """The keys and values of one attention, [B, H, slots, size]; slot = position.

    Slots past a row's position hold nothing.
    """

    buffer: Buffer
    version: int  # of the buffer when this was made
    epoch: int  # of the buffer when this was made
    used: int  # slots that some row uses

    @classmethod
    def of(cls, k: Tensor, v: Tensor) -> KV:
        """Keys and values in a new buffer, all slots used."""
        return cls(Buffer(k, v), 0, 0, k.shape[2])

    @classmethod
    def empty(
        cls, batch: int, heads: int, size: int, device: torch.device, dtype: torch.dtype
    ) -> KV:
        """Keys and values of `batch` rows that have read nothing."""
        nothing = torch.zeros(batch, heads, 0, size, device=device, dtype=dtype)
        return cls.of(nothing, nothing)

    @property
    def k(self) -> Tensor:
        """[B, H, used, size]; refused after a rollback."""
        self._fresh()
        return self.buffer.k[:, :, : self.used]

    @property
    def v(self) -> Tensor:
        """[B, H, used, size]; refused after a rollback."""
        self._fresh()
        return self.buffer.v[:, :, : self.used]

    def _fresh(self) -> None:
        if self.epoch != self.buffer.epoch:
            raise AmorError(
                "this state was rolled back and is gone; fork it before rollback to keep both"
            )

    def map(self, change: Callable[[Tensor], Tensor]) -> KV:
        """New keys and values by a function of tensors [B, ...]."""
        return KV.of(change(self.k), change(self.v))

    def append(self, k: Tensor, v: Tensor, layout: Layout) -> KV:
        """The keys and values after a call; k and v are [B, H, T, size] of the new tokens."""
        if layout.reset is not None:
            return self._append_documents(k, v, layout)
        if self.used == 0:
            return KV.of(k, v)
        if k.requires_grad or self.buffer.k.requires_grad:
            return self._append_by_value(k, v, layout)
        return self._append_in_place(k, v, layout)

    def _append_in_place(self, k: Tensor, v: Tensor, layout: Layout) -> KV:
        after = self.with_open_slots(layout)
        for memory, new in ((after.buffer.k, k), (after.buffer.v, v)):
            if layout.rows_aligned:
                memory[:, :, layout.max_position : after.used] = new
            else:
                memory[_rows(layout), :, layout.positions] = new.transpose(1, 2)
        return after

    def with_open_slots(self, layout: Layout) -> KV:
        """The keys and values after a call, with free slots where the call will write its own."""
        self._fresh()
        used = layout.max_position + layout.columns
        buffer = self.buffer
        if buffer.version != self.version or buffer.capacity < used:
            buffer = Buffer(*(with_room(t, used) for t in (self.k, self.v)))
        buffer.version += 1
        return KV(buffer, buffer.version, buffer.epoch, used)

    def _append_by_value(self, k: Tensor, v: Tensor, layout: Layout) -> KV:
        if layout.rows_aligned:
            past = layout.max_position
            return KV.of(
                torch.cat([self.k[:, :, :past], k], 2), torch.cat([self.v[:, :, :past], v], 2)
            )
        used, where = layout.max_position + layout.columns, (_rows(layout), layout.positions)
        grown = [
            with_room(old, used, exact=True)
            .transpose(1, 2)
            .index_put(where, new.transpose(1, 2))
            .transpose(1, 2)
            for old, new in ((self.k, k), (self.v, v))
        ]
        return KV.of(*grown)

    def _append_documents(self, k: Tensor, v: Tensor, layout: Layout) -> KV:
        """Keep the keys of each row's last document only, moved to the slots of its positions."""
        slots = torch.arange(max(int(layout.end.max()), 1), device=k.device)[None]
        kept = torch.where(
            slots < layout.start[:, None],
            slots,
            layout.max_position + slots - layout.start[:, None],
        )
        began = layout.last_reset[:, None]
        source = torch.where(began < 0, kept, layout.max_position + began + slots)
        source = source.clamp(max=layout.max_position + layout.columns - 1)[:, None, :, None]

        def moved(old: Tensor, new: Tensor) -> Tensor:
            both = torch.cat([old[:, :, : layout.max_position], new], 2)
            return both.gather(2, source.expand(-1, both.shape[1], -1, both.shape[3]))

        return KV.of(moved(self.k, k), moved(self.v, v))

    def reserve(self, slots: int) -> KV:
        """The same keys and values with capacity for this many slots."""
        if self.buffer.capacity == slots and self.buffer.version == self.version:
            return self
        k, v = (with_room(t, max(slots, self.used), exact=True) for t in (self.k, self.v))
        return KV(Buffer(k, v), 0, 0, self.used)

    def claim(self, used: int) -> KV:
        """This buffer cut to `used` slots, to be appended to from there.

        Every other State of the buffer is refused from now on.
        """
        self._fresh()
        self.buffer.epoch += 1
        self.buffer.version += 1
        return KV(self.buffer, self.buffer.version, self.buffer.epoch, used)

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer, spare capacity included."""
        return self.buffer.k.nbytes + self.buffer.v.nbytes


def _rows(layout: Layout) -> Tensor:
    return torch.arange(len(layout.start), device=layout.start.device)[:, None].expand_as(
        layout.positions
    )


def with_room(t: Tensor, used: int, exact: bool = False) -> Tensor:
    """A copy of t [B, H, slots, size] with capacity for `used` slots, by default half as many more.

    Zeros, not empty memory: a masked slot still meets the softmax, and 0 * NaN is NaN.
    """
    capacity = used if exact else max(64, used + used // 2)
    larger = t.new_zeros(*t.shape[:2], capacity, t.shape[3])
    larger[:, :, : t.shape[2]] = t[:, :, :capacity]
    return larger
