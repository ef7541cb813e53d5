"""Where the tokens of one call stand: which are real, where documents begin, at which positions they are.

Whatever padding a caller uses, the model works on rows whose real tokens come first (`align`); what is left is a length
a row. So a row is computed the same way alone, padded on either side, or beside longer neighbours.
Letters: B rows, T columns, [B, T] tensors unless noted.
"""

from dataclasses import dataclass, field
from functools import cache, cached_property

import torch
from torch import Tensor

from amor.errors import AmorError


@dataclass(frozen=True)
class Layout:
    start: Tensor  # [B] position of each row's first token in this call
    columns: int
    rows_aligned: bool  # every row starts at the same position, `max_position`
    max_position: int  # the largest start: how many slots a state holds at the most
    lengths: Tensor | None = None  # [B] real tokens a row; None: all columns are real
    reset: Tensor | None = None  # True where a document begins and nothing before it may be seen
    _shared: dict = field(
        default_factory=dict, repr=False
    )  # what layers compute alike, computed once

    @cached_property
    def valid(self) -> Tensor | None:
        if self.lengths is None:
            return None
        return self.column < self.lengths[:, None]

    @cached_property
    def column(self) -> Tensor:
        return torch.arange(self.columns, device=self.start.device)[None]

    @cached_property
    def segments(self) -> Tensor | None:
        """The number of documents begun so far in this call: 0 continues what the state holds."""
        return None if self.reset is None else self.reset.long().cumsum(1)

    @cached_property
    def last_reset(self) -> Tensor:
        """[B] the column of the last document's beginning among real tokens, or -1 where none begins."""
        assert self.reset is not None
        begins = self.reset if self.valid is None else self.reset & self.valid
        return torch.where(begins, self.column, -1).amax(1)

    @cached_property
    def positions(self) -> Tensor:
        """Position inside its own document; also the slot of its key in a state."""
        plain = self.start[:, None] + self.column
        if self.reset is None:
            return plain
        began = torch.where(self.reset, self.column, -1).cummax(1).values
        return torch.where(began < 0, plain, self.column - began)

    @cached_property
    def end(self) -> Tensor:
        """[B] the position after this call."""
        lengths = (
            torch.full_like(self.start, self.columns) if self.lengths is None else self.lengths
        )
        if self.reset is None:
            return self.start + lengths
        return torch.where(self.last_reset < 0, self.start + lengths, lengths - self.last_reset)

    @property
    def causal(self) -> bool:
        """Plain causal attention inside this call is right: nothing came before and no document ends."""
        return self.max_position == 0 and self.reset is None

    @cached_property
    def mask(self) -> Tensor:
        """[B, T, keys] where documents begin: what a query may see of the state's slots, then of the columns of this call."""
        assert self.reset is not None and self.segments is not None
        old = torch.arange(self.max_position, device=self.start.device)[None] < self.start[:, None]
        old = (self.segments == 0)[..., None] & old[:, None]
        new = (self.segments[..., None] == self.segments[:, None]) & (self.column.mT >= self.column)
        return torch.cat([old, new], dim=-1)

    def rotary(self, head_size: int, theta: float) -> tuple[Tensor, Tensor]:
        """Cosine and sine of every position, [B, T, head_size / 2] in float32."""
        key = (head_size, theta)
        if key not in self._shared:
            angles = self.positions[..., None].float() * frequencies(
                head_size, theta, self.start.device
            )
            self._shared[key] = angles.cos(), angles.sin()
        return self._shared[key]

    def last(self) -> "Layout":
        """The layout of each row's last real token alone, as seen after this call."""
        even = self.rows_aligned and self.lengths is None and self.reset is None
        past = (
            self.max_position + self.columns if self.reset is None else max(int(self.end.max()), 1)
        )
        return Layout((self.end - 1).clamp(min=0), 1, even, past - 1)


@cache
def frequencies(head_size: int, theta: float, device: torch.device) -> Tensor:
    """[head_size / 2] radians a position."""
    return theta ** -(torch.arange(0, head_size, 2, device=device, dtype=torch.float32) / head_size)


def check_token_ids(tokens: Tensor, vocab: int, valid: Tensor | None = None) -> None:
    """Refuse tokens that are not [B, T] whole numbers in 0..vocab - 1; pads may hold anything.

    The numbers themselves are looked at on the CPU only: elsewhere that would wait for the device.
    """
    if tokens.ndim != 2 or tokens.dtype not in (torch.int64, torch.int32):
        dtype = str(tokens.dtype).removeprefix("torch.")
        raise AmorError(
            f"tokens are {dtype} of shape {list(tokens.shape)}; give int64 of shape [rows, columns]"
        )
    if tokens.device.type != "cpu" or torch.compiler.is_compiling():
        return
    real = tokens if valid is None or valid.shape != tokens.shape else tokens[valid.bool()]
    if not real.numel():
        return
    least, largest = (int(t) for t in real.aminmax())
    if least < 0 or largest >= vocab:
        wrong = least if least < 0 else largest
        raise AmorError(f"token {wrong} is outside the vocabulary, 0 to {vocab - 1}")


def align(valid: Tensor) -> tuple[Tensor, Tensor | None]:
    """For a mask of real tokens: the lengths of the rows, and the column order that puts real tokens first (None: as is)."""
    lengths = valid.sum(1)
    if bool((valid[:, 1:] <= valid[:, :-1]).all()):
        return lengths, None
    return lengths, torch.argsort(~valid, dim=1, stable=True)


def last_real(t: Tensor, layout: Layout) -> Tensor:
    """[B, 1, ...] each row's last real token."""
    if layout.lengths is None:
        return t[:, -1:]
    index = (layout.lengths - 1).clamp(min=0)
    return t[torch.arange(len(t), device=t.device), index][:, None]
