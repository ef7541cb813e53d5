"""A model in front of windows of text, and what it loses on them when its gates decide otherwise.

With one block, whether a token fires changes that token's prediction and nothing else (keys and values are always
computed), so two passes, all closed and all open, give the loss of every choice. With more blocks a firing changes what
later blocks read and remember, so every choice is run again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

import torch
from torch import Tensor

from amor.data.loader import Windows
from amor.errors import AmorError
from amor.gates.base import Gate
from amor.gates.once import Follower
from amor.judge.gates import Told, Watched, all_told
from amor.judge.loop import ROWS, Gates, Here, Judged, Residuals, gathered, read
from amor.models.amor import Amor


@dataclass
class Reader:
    """A model and windows of text. Tensors it gives are [n, T] a block or over all."""

    model: Amor
    windows: Windows
    gates: Sequence[Gate]  # those that are judged, one a block
    rows: int = ROWS
    seen: Callable[[int], None] = lambda tokens: None
    residuals: Residuals = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.gates:
            raise AmorError(f"{self.model.config.name} has no gated blocks, so there is no gate to judge; give an AMOR model")

    @property
    def blocks(self) -> int:
        return len(self.gates)

    @property
    def once(self) -> bool:
        """Whether one gate decides for all blocks."""
        return isinstance(self.gates[-1], Follower)

    @property
    def shape(self) -> tuple[int, int, int]:
        """[K, n, T]"""
        return self.blocks, len(self.windows), self.windows.columns

    def run(self, gates: Gates) -> Judged:
        said = read(self.model, self.windows, rows=self.rows, gates=gates, residuals=self.residuals, seen=self.seen)
        return gathered(said)

    @cached_property
    def closed(self) -> Tensor:
        """[n, T] nll with every block closed; read when it is first asked for."""
        return self.run(all_told(self.model, False)).nll

    @cached_property
    def opened(self) -> Tensor:
        """[n, T] nll with every block open; read when it is first asked for."""
        return self.run(all_told(self.model, True)).nll

    def told(self, fire: Tensor) -> Tensor:
        """[n, T] nll when exactly the marks of fire, [K, n, T], fire."""
        if self.blocks == 1:
            return torch.where(fire[0], self.opened, self.closed)
        return self.run(lambda here: [Told(block[here]) for block in fire]).nll

    def as_it_is(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """With the gates that are judged: nll [n, T]; fire, entropy and gain [K, n, T].

        The gain of a block is what firing it saves a token, in nats, with the blocks before it as they decided and those
        after it closed.
        """
        watched = [Watched(gate, "entropy", "gain") for gate in self.gates]
        found = self.run(watched)
        entropy, gain = (torch.stack([gate.seen(name, 0).cpu() for gate in watched]) for name in ("entropy", "gain"))
        return found.nll, found.fire, entropy, gain

    def gain(self, block: int, fire: Tensor) -> Tensor:
        """[n, T] the gain of a block when those before it fire at these marks."""
        watched = Watched(Told(False), "gain")
        self.run(lambda here: [*(Told(f[here]) for f in fire[:block]), watched, *(Told(False) for _ in fire[block + 1 :])])
        return watched.seen("gain", 0).cpu()

    def oracle(self, first: Tensor, choose: Callable[[int, Tensor], Tensor]) -> Tensor:
        """[K, n, T] marks chosen by true gain, block after block; `first` is the gain of block 0, which nothing changes.

        Where one gate decides for all blocks, so does the oracle, by the gain of all.
        """
        if self.once:
            return choose(0, self.closed - self.opened).expand(self.shape)
        fire = torch.zeros(self.shape, dtype=torch.bool)
        for k in range(self.blocks):
            fire[k] = choose(k, first if k == 0 else self.gain(k, fire))
        return fire

    def highest(self, rate: float) -> Tensor:
        """[K, n, T] marks at the highest scores of every block, exactly this share of them, with the blocks before it as they
        decided."""
        fire = torch.zeros(self.shape, dtype=torch.bool)
        for k, gate in enumerate(self.gates):
            score = self.run(partial(_asking, fire, k, gate)).score[k]
            fire[k] = largest(score, round(rate * score.numel()))
        return fire


def _asking(fire: Tensor, block: int, gate: Gate, here: Here) -> list[Gate]:
    """One gate among others that do as they are told."""
    return [gate if k == block else Told(marks[here]) for k, marks in enumerate(fire)]


def largest(values: Tensor, count: int) -> Tensor:
    """Marks at the `count` largest values."""
    marks = torch.zeros(values.numel(), dtype=torch.bool)
    marks[values.flatten().topk(count).indices] = True
    return marks.view_as(values)


def shuffled(fire: Tensor, seed: int) -> Tensor:
    """The decisions of all blocks on a token, handed to a random other token: every block fires as often as before."""
    order = torch.randperm(fire[0].numel(), generator=torch.Generator().manual_seed(seed))
    return fire.flatten(1)[:, order].view_as(fire)
