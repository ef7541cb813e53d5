"""The one loop that reads text with a model: windows in, what the model said of every token out.

A window is a row, and some rows are read at a time; a window longer than `columns` is read in pieces, its state going on.
The answer depends on neither. The model is not changed: gates, the way of computing and what the backbone said before are
handed to its forward as values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from amor.data.loader import Windows
from amor.gates.base import Gate
from amor.models.amor import Amor, Output
from amor.state import State

ROWS = 8  # windows read at a time
PIECE = 1024  # columns of a long text read at a time

Here = tuple[slice, slice]  # rows and columns of the windows
Gates = Sequence[Gate] | Callable[[Here], Sequence[Gate]] | None  # one a block, for all tokens or by place; None: the model's own
Residuals = dict[tuple[int, int], Tensor]  # what the backbone said, by the first row and column it was read at


class Text(Protocol):
    """Windows of text: amor.data.loader.Windows, or those that are read from disk when they are asked for."""

    def __len__(self) -> int: ...

    def __getitem__(self, rows: slice) -> Windows: ...


@dataclass(frozen=True)
class Said:
    """What a model said of one piece of the text."""

    here: Here
    text: Windows
    out: Output

    @property
    def nll(self) -> Tensor:
        """[rows, columns] nats of each target; 0 where there is none."""
        assert self.out.nll is not None
        return self.out.nll

    @property
    def fire(self) -> Tensor:
        """[K, rows, columns]"""
        return self._stacked([gate.fire for gate in self.out.gates], torch.bool)

    @property
    def score(self) -> Tensor:
        """[K, rows, columns]"""
        return self._stacked([gate.score for gate in self.out.gates], torch.float32)

    def _stacked(self, each: list[Tensor], dtype: torch.dtype) -> Tensor:
        return torch.stack(each) if each else self.nll.new_zeros(0, *self.nll.shape, dtype=dtype)


@dataclass(frozen=True)
class Judged:
    """What a model said of a whole text, on the CPU."""

    nll: Tensor  # [n, T] nats of each target; 0 where there is none
    fire: Tensor  # [K, n, T]
    score: Tensor  # [K, n, T] what each gate compared with its threshold


@torch.no_grad()
def read(
    model: Amor,
    text: Text,
    *,
    rows: int = ROWS,
    columns: int | None = None,  # None: whole windows
    gates: Gates = None,
    compute: str = "auto",  # as the model's forward takes it
    residuals: Residuals | None = None,  # filled by the first reading and used by later ones: no gate changes the backbone
    forward: Callable[..., Output] | None = None,  # what is called in the model's place, e.g. under autocast
    seen: Callable[[int], None] = lambda tokens: None,  # told how many tokens were read
) -> Iterator[Said]:
    """Every window of a text, piece by piece: rows after rows, and of those columns after columns."""
    call, device = forward or model, model.embed.weight.device
    for first in range(0, len(text), rows):
        held = text[first : first + rows].to(device)
        state: State | None = None
        for start in range(0, held.columns, columns or held.columns):
            piece = held.between(start, min(start + (columns or held.columns), held.columns))
            here = slice(first, first + len(held)), slice(start, start + piece.columns)
            chosen = gates(here) if callable(gates) else gates
            before = None if residuals is None else residuals.get((first, start))
            given = {"reset": piece.reset, "targets": piece.targets, "gates": chosen, "compute": compute, "residual": before}
            out = call(piece.tokens, state, **given)
            state = out.state
            if residuals is not None:
                residuals[first, start] = out.residual
            seen(piece.tokens.numel())
            yield Said(here, piece, out)


def gathered(said: Iterable[Said]) -> Judged:
    """All pieces as one."""
    parts: dict[int, list[tuple[Tensor, ...]]] = {}  # pieces by their first row
    for one in said:
        parts.setdefault(one.here[0].start, []).append((one.nll.cpu(), one.fire.cpu(), one.score.cpu()))
    rows = [[torch.cat(pieces, -1) for pieces in zip(*part, strict=True)] for part in parts.values()]
    return Judged(*(torch.cat(whole, -2) for whole in zip(*rows, strict=True)))
