"""Which tokens of one call are real, where documents begin, and the positions of all of them.

Whatever padding a caller uses, the model works on rows whose real tokens come first (`align`); what
is left is one length per row. So a row is computed the same way alone, padded on either side, or
beside longer neighbours. Letters: B rows, T columns, [B, T] tensors unless noted.
"""

from dataclasses import dataclass, field
from functools import cache, cached_property

import torch
from torch import Tensor

from amor.errors import AmorError


@dataclass(frozen=True)
class Layout:
    """How the tokens [B, T] of one call continue a State."""

    start: Tensor  # [B] position of each row's first token in this call
    columns: int  # T
    rows_aligned: bool  # every row starts at the same position, `max_position`
    max_position: int  # the largest start: how many key slots a State has at most
    lengths: Tensor | None = None  # [B] real tokens per row; None: all columns are real
    reset: Tensor | None = None  # True where a document begins and nothing before it may be seen
    _rotary: dict[tuple[int, float], tuple[Tensor, Tensor]] = field(
        default_factory=dict, repr=False
    )

    @cached_property
    def valid(self) -> Tensor | None:
        """[B, T] False at pads; None: every column is real."""
        if self.lengths is None:
            return None
        return self.column < self.lengths[:, None]

    @cached_property
    def column(self) -> Tensor:
        """[1, T] the number of each column."""
        return torch.arange(self.columns, device=self.start.device)[None]

    @cached_property
    def segments(self) -> Tensor | None:
        """Documents begun so far in this call; 0: the document that the State belongs to."""
        return None if self.reset is None else self.reset.long().cumsum(1)

    @cached_property
    def last_reset(self) -> Tensor:
        """[B] the column where the row's last document begins, -1 where none begins."""
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
        """Whether plain causal attention is right: nothing came before and no document begins."""
        return self.max_position == 0 and self.reset is None

    @cached_property
    def mask(self) -> Tensor:
        """[B, T, max_position + T] which keys a query may see where documents begin.

        Keys are the slots of the State, then the columns of this call.
        """
        assert self.reset is not None and self.segments is not None
        old = torch.arange(self.max_position, device=self.start.device)[None] < self.start[:, None]
        old = (self.segments == 0)[..., None] & old[:, None]
        new = (self.segments[..., None] == self.segments[:, None]) & (self.column.mT >= self.column)
        return torch.cat([old, new], dim=-1)

    def rotary(self, head_size: int, theta: float) -> tuple[Tensor, Tensor]:
        """Cosine and sine of every position, [B, T, head_size / 2] in float32.

        Computed once per call and shared by all layers.
        """
        key = (head_size, theta)
        if key not in self._rotary:
            angles = self.positions[..., None].float() * frequencies(
                head_size, theta, self.start.device
            )
            self._rotary[key] = angles.cos(), angles.sin()
        return self._rotary[key]

    def last(self) -> "Layout":
        """The layout of each row's last real token alone, as seen after this call."""
        even = self.rows_aligned and self.lengths is None and self.reset is None
        past = (
            self.max_position + self.columns if self.reset is None else max(int(self.end.max()), 1)
        )
        return Layout((self.end - 1).clamp(min=0), 1, even, past - 1)


@dataclass(frozen=True)
class StepLayout(Layout):
    """The layout of a decode step: one token per row, where several rows may be tokens of one text.

    Draft tokens are read this way: consecutive rows of a chain continue each other.
    """

    chains: Tensor | None = None  # [count + 1] int64 first rows of chains; None: each row is one


@cache
def frequencies(head_size: int, theta: float, device: torch.device) -> Tensor:
    """[head_size / 2] radians per position."""
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
    if not tokens.shape[0]:
        raise AmorError("no rows: tokens of shape [rows, columns] need at least one")
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
    """Lengths [B] of the rows of a mask, and the column order [B, T] with real tokens first.

    None in place of the order: they are first already.
    """
    lengths = valid.sum(1)
    if bool((valid[:, 1:] <= valid[:, :-1]).all()):
        return lengths, None
    return lengths, torch.argsort(~valid, dim=1, stable=True)


def last_real(t: Tensor, layout: Layout) -> Tensor:
    """[B, 1, ...] the entry of t [B, T, ...] at each row's last real token."""
    if layout.lengths is None:
        return t[:, -1:]
    index = (layout.lengths - 1).clamp(min=0)
    return t[torch.arange(len(t), device=t.device), index][:, None]
