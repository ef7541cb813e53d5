"""The one loop that feeds text to a model: chunk after chunk, the state carried from each to the
next.

`run_windows` feeds windows of equal length, `run_chunks` any sequence of chunks
(amor/eval/score.py: rows of different lengths, padded). How a text is cut into rows and chunks
changes results by rounding only. The model is not changed: gates, the way of computing and
residuals of the backbone are arguments of its forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from amor.data.loader import Windows
from amor.errors import AmorError
from amor.gates.base import Gate
from amor.models.amor import Amor, Output
from amor.models.gated import PassOptions
from amor.state import State

ROWS = 8  # windows per forward call; enough to keep matrix products busy at the sizes trained here
CHUNK = 1024  # columns per forward call of a long text, which bounds the memory of activations

Place = tuple[slice, slice]  # rows and columns of a text
# one gate per block, for all tokens, or a function that gives them for a place; None: the model's
# own gates
GateChoice = Sequence[Gate] | Callable[[Place], Sequence[Gate]] | None
# outputs of the backbone, by first row and first column of the chunk
Residuals = dict[tuple[int, int], Tensor]


def ignore_tokens(count: int) -> None:
    """The default of `on_tokens` callbacks: no progress is shown."""


def check_finite(model: Amor, *losses: Tensor) -> None:
    """An error where a model gives numbers that are not finite."""
    if not all(bool(torch.isfinite(each).all()) for each in losses):
        numbers = f"{model.config.name} gives losses that are not finite on this text"
        raise AmorError(f"{numbers}; its weights are broken")


class WindowSource(Protocol):
    """Windows of text: amor.data.loader.Windows, or windows read from disk when indexed."""

    def __len__(self) -> int: ...

    def __getitem__(self, rows: slice) -> Windows: ...


@dataclass(frozen=True)
class Chunk:
    """The input of one forward call; every tensor is [rows, columns], on the model's device."""

    place: Place  # rows and columns of the text
    tokens: Tensor
    targets: Tensor | None = None  # None: no loss is computed
    reset: Tensor | None = None  # True at the first token of a document
    valid: Tensor | None = None  # False at padding; None: there is none
    # number of the question that a target answers, 0 for none; of generated tasks
    question: Tensor | None = None


@dataclass(frozen=True)
class ChunkOutput:
    """One chunk and the model's output for it."""

    chunk: Chunk
    out: Output

    @property
    def nll(self) -> Tensor:
        """[rows, columns] negative log-likelihood in nats; 0 where there is no target."""
        assert self.out.nll is not None, "a chunk without targets has no loss"
        return self.out.nll

    @cached_property
    def fire(self) -> Tensor:
        """[K, rows, columns] True where block k fired."""
        return self._stack([gate.fire for gate in self.out.gates], torch.bool)

    @cached_property
    def score(self) -> Tensor:
        """[K, rows, columns] the number that the gate of block k compared with its threshold."""
        return self._stack([gate.score for gate in self.out.gates], torch.float32)

    def _stack(self, per_block: list[Tensor], dtype: torch.dtype) -> Tensor:
        tokens = self.chunk.tokens
        if not per_block:
            return tokens.new_zeros(0, *tokens.shape, dtype=dtype)
        return torch.stack(per_block)


@dataclass(frozen=True)
class CorpusOutput:
    """The outputs for a whole text of n windows, on the CPU."""

    nll: Tensor  # [n, T] nats per target; 0 where there is no target
    fire: Tensor  # [K, n, T]
    score: Tensor  # [K, n, T] what each gate compared with its threshold


@torch.no_grad()
def run_chunks(
    forward: Callable[..., Output],  # the model, or a function with the signature of its forward
    chunks: Iterable[Chunk],  # of the same rows, one behind another
    *,
    state: State | None = None,  # before the first chunk; None: the beginning of a text
    gates: GateChoice = None,
    compute: str = "auto",  # as the forward takes it
    residuals: Residuals | None = None,
    # called after each chunk with its number of tokens
    on_tokens: Callable[[int], None] = ignore_tokens,
) -> Iterator[ChunkOutput]:
    """Feed consecutive chunks of the same rows, each from the state after the one before."""
    for chunk in chunks:
        key = chunk.place[0].start, chunk.place[1].start
        out = forward(
            chunk.tokens,
            state,
            reset=chunk.reset,
            valid=chunk.valid,
            targets=chunk.targets,
            options=PassOptions(
                gates=gates(chunk.place) if callable(gates) else gates,
                compute=compute,
                residual=None if residuals is None else residuals.get(key),
            ),
        )
        state = out.state
        if residuals is not None:
            residuals[key] = out.residual
        on_tokens(chunk.tokens.numel() if chunk.valid is None else int(chunk.valid.sum()))
        yield ChunkOutput(chunk, out)


def run_windows(
    model: Amor,
    text: WindowSource,
    *,
    rows: int = ROWS,
    columns: int | None = None,  # of a chunk; None: whole windows
    gates: GateChoice = None,
    compute: str = "auto",
    # filled by the first run and reused by later ones: gates do not change the backbone
    residuals: Residuals | None = None,
    # called instead of the model, e.g. under autocast
    forward: Callable[..., Output] | None = None,
    on_tokens: Callable[[int], None] = ignore_tokens,
) -> Iterator[ChunkOutput]:
    """Feed windows from their beginning, `rows` at a time in chunks of `columns` columns."""
    for first in range(0, len(text), rows):
        windows = text[first : first + rows].to(model.embed.weight.device)
        yield from run_chunks(
            forward or model,
            cut_columns(windows, first, columns or windows.columns),
            gates=gates,
            compute=compute,
            residuals=residuals,
            on_tokens=on_tokens,
        )


def cut_columns(windows: Windows, first_row: int, columns: int) -> Iterator[Chunk]:
    """Windows, of which the first is row `first_row` of its text, as chunks of columns."""
    rows = slice(first_row, first_row + len(windows))
    for start in range(0, windows.columns, columns):
        part = windows.between(start, min(start + columns, windows.columns))
        place = rows, slice(start, start + part.columns)
        yield Chunk(place, part.tokens, part.targets, part.reset, question=part.question)


def join_chunks(outputs: Iterable[ChunkOutput]) -> CorpusOutput:
    """The outputs of `run_windows` as one, in the order of the text."""
    parts: dict[int, list[tuple[Tensor, ...]]] = {}  # by first row
    for each in outputs:
        kept = each.nll.cpu(), each.fire.cpu(), each.score.cpu()
        parts.setdefault(each.chunk.place[0].start, []).append(kept)
    rows = [
        [torch.cat(columns, -1) for columns in zip(*part, strict=True)] for part in parts.values()
    ]
    return CorpusOutput(*(torch.cat(whole, -2) for whole in zip(*rows, strict=True)))
