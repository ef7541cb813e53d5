"""A model in front of windows of text, and what it loses on them when its gates decide otherwise.

With one block, whether a token fires changes that token's prediction and nothing else (keys and values are always
computed), so two passes, all closed and all open, give the loss of every choice. With more blocks a firing changes what
later blocks read and remember, so every choice is run again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from amor.errors import AmorError
from amor.gates.base import Gate
from amor.judge.override import Told, Watched, gated, own_gates
from amor.judge.windows import Windows
from amor.layout import Layout
from amor.models.amor import Amor
from amor.models.backbone import Backbone
from amor.state import Part


@dataclass
class Reader:
    """A model and windows of text. Tensors it gives are [n, T] a block or over all."""

    model: Amor
    windows: Windows
    rows: int
    seen: Callable[[int], None]
    found: dict[int, Tensor] = field(default_factory=dict)  # what the backbone said of the rows from a window on

    def __post_init__(self) -> None:
        self.blocks = len(self.model.each_block())
        if not self.blocks:
            raise AmorError(f"{self.model.config.name} has no gated blocks, so there is no gate to judge; give an AMOR model")
        self.shape = (self.blocks, *self.windows.tokens.shape)
        self.closed = self.run(lambda _: [Told(False)] * self.blocks)[0]
        self.opened = self.run(lambda _: [Told(True)] * self.blocks)[0]

    @torch.no_grad()
    def run(self, gates: Callable[[slice], Sequence[Gate]]) -> tuple[Tensor, Tensor]:
        """The nll of every token, [n, T], and where each block fired, [K, n, T]."""
        nll, fire = [], []
        device = self.model.embed.weight.device
        for start in range(0, len(self.windows.tokens), self.rows):
            here = slice(start, start + self.rows)
            tokens, targets, reset = self.windows.tokens[here], self.windows.targets[here], self.windows.reset
            with gated(self.model, gates(here)), remembering(self.model.backbone, self.found, start):
                reset = None if reset is None else reset[here].to(device)
                out = self.model(tokens.to(device), reset=reset, targets=targets.to(device))
            assert out.nll is not None
            self.seen(tokens.numel())
            nll.append(out.nll.cpu())
            fire.append(torch.stack([g.fire for g in out.gates]).cpu())
        return torch.cat(nll), torch.cat(fire, 1)

    def told(self, fire: Tensor) -> Tensor:
        """[n, T] nll when exactly the marks of fire, [K, n, T], fire."""
        if self.blocks == 1:
            return torch.where(fire[0], self.opened, self.closed)
        return self.run(lambda here: [Told(block[here]) for block in fire])[0]

    def as_it_is(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """With the model's own gates: nll [n, T]; fire, entropy and gain [K, n, T].

        The gain of a block is what firing it saves a token, in nats, with the blocks before it as they decided and those
        after it closed.
        """
        watched = [Watched(gate, "entropy", "gain") for gate in own_gates(self.model)]
        nll, fire = self.run(lambda _: watched)
        entropy, gain = (torch.stack([gate.seen(name, 0).cpu() for gate in watched]) for name in ("entropy", "gain"))
        return nll, fire, entropy, gain

    def gain(self, block: int, fire: Tensor) -> Tensor:
        """[n, T] the gain of a block when those before it fire at these marks."""
        watched = Watched(Told(False), "gain")

        def gates(here: slice) -> list[Gate]:
            return [*(Told(f[here]) for f in fire[:block]), watched, *(Told(False) for _ in fire[block + 1 :])]

        self.run(gates)
        return watched.seen("gain", 0).cpu()

    def oracle(self, first: Tensor, choose: Callable[[int, Tensor], Tensor]) -> Tensor:
        """[K, n, T] marks chosen by true gain, block after block; `first` is the gain of block 0, which nothing changes."""
        fire = torch.zeros(self.shape, dtype=torch.bool)
        for k in range(self.blocks):
            fire[k] = choose(k, first if k == 0 else self.gain(k, fire))
        return fire


@contextmanager
def remembering(backbone: Backbone, found: dict[int, Tensor], start: int) -> Iterator[None]:
    """While it lasts, the backbone is asked once for each `start`: no gate can change what it says."""

    def recall(h: Tensor, parts: Sequence[Part], layout: Layout) -> tuple[Tensor, list[Part]]:
        if start in found:
            return found[start], list(parts)
        found[start], after = Backbone.forward(backbone, h, parts, layout)
        return found[start], after

    backbone.forward = recall  # type: ignore[method-assign]
    try:
        yield
    finally:
        del backbone.forward  # the class's own comes back


def largest(values: Tensor, count: int) -> Tensor:
    """Marks at the `count` largest values."""
    marks = torch.zeros(values.numel(), dtype=torch.bool)
    marks[values.flatten().topk(count).indices] = True
    return marks.view_as(values)


def shuffled(fire: Tensor, seed: int) -> Tensor:
    """The decisions of all blocks on a token, handed to a random other token: every block fires as often as before."""
    order = torch.randperm(fire[0].numel(), generator=torch.Generator().manual_seed(seed))
    return fire.flatten(1)[:, order].view_as(fire)
