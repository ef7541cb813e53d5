"""Targets of gates that predict, measured on a sample of the tokens of one forward.

The target is the gain of firing, or the entropy of the head. The gain of a token is the nll of its
true next token with blocks closed minus the nll with them fired. With a gate per block: this block,
those before it as they decided, those after it closed. With one gate for all: all blocks against
none. Keys and values are those of the forward, so a sample costs only its own queries and readings
of the head; for a token that did not fire, blocks after the first keep the key and value of the
closed residual.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from amor.errors import AmorError
from amor.gates.evidence import head_evidence, present
from amor.ops import head

if TYPE_CHECKING:
    from amor.models.block import TorchBlocks


@dataclass(frozen=True)
class Measured:
    """The sample of one gate."""

    x: Tensor  # [n, D] inputs of its block
    value: Tensor  # [n] gain in nats (0 where there is no target), or normalised entropy


class Measure:
    """Observes the blocks of one pass; afterwards fires them at the sampled tokens."""

    def __init__(
        self, blocks: TorchBlocks, columns: Tensor, targets: Tensor | None, weight: Tensor
    ):
        """columns: [B, S] of the sample; targets: [B, T]; weight: [V, D] of the head."""
        if targets is None or blocks.layout.valid is not None:
            raise AmorError(
                "gains are measured against true next tokens, in rows without pads: call the "
                "model with targets"
            )
        rows = torch.arange(len(columns), device=columns.device)[:, None].expand_as(columns)
        self.blocks, self.place, self.weight = blocks, (rows.flatten(), columns.flatten()), weight
        self.gates = [block.gate for block in blocks.blocks]
        self.targets = targets[self.place]
        self.h: list[Tensor] = []  # per block: the residual before it, [n, D]
        self.x: list[Tensor] = []
        # per block: from h and x [n, D] of the sample to its residual after firing
        self.fired: list[partial[Tensor]] = []

    def __call__(self, index: int, h: Tensor, x: Tensor) -> None:
        self.h.append(h.detach()[self.place])
        self.x.append(x.detach()[self.place])
        block, keys = self.blocks.blocks[index], self.blocks.keys[index]
        self.fired.append(partial(block.fired_at, *keys, self.blocks.layout, place=self.place))

    @torch.no_grad()
    def results(self) -> tuple[Measured | None, ...]:
        """One per block, None where its gate measures nothing."""
        count = range(len(self.gates))
        values = self._gains([k for k in count if self.gates[k].measures == "gain"])
        values |= self._entropies([k for k in count if self.gates[k].measures == "entropy"])
        return tuple(Measured(self.x[k], values[k]) if k in values else None for k in count)

    def _gains(self, blocks: list[int]) -> dict[int, Tensor]:
        """[n] nats that firing saves, by block."""
        if not blocks:
            return {}
        nll = self._nll(
            torch.stack([h for k in blocks for h in (self.h[k], self._residual_if_fired(k))])
        )
        return dict(zip(blocks, nll[0::2] - nll[1::2], strict=True))

    def _entropies(self, blocks: list[int]) -> dict[int, Tensor]:
        """[n] normalised entropy of the head, by block."""
        if not blocks:
            return {}
        vectors = torch.stack([self.blocks.norms.probe(self.h[k], self.x[k]) for k in blocks])
        stats = head.read(vectors.flatten(0, 1), self.weight, entropy=True)
        entropy = head_evidence(stats, len(self.weight), {"entropy"})["entropy"]
        return dict(zip(blocks, entropy.view(vectors.shape[:2]), strict=True))

    def _residual_if_fired(self, first: int) -> Tensor:
        """The residual after block `first` fired, and after every block that follows its gate."""
        h = self.h[first]
        for index in range(first, len(self.gates)):
            if index == first or self.gates[index].decider is not self.gates[index]:
                h = self.fired[index](h, self.blocks.input(index, h))
        return h

    def _nll(self, h: Tensor) -> Tensor:
        """[..., n, D] residuals -> [..., n] nats of the true next tokens, 0 where there is none."""
        targets = self.targets.expand(h.shape[:-1])
        vectors = self.blocks.norms.output(h).flatten(0, -2)
        nll = present(head.read(vectors, self.weight, targets.flatten()).nll)
        return nll.view(h.shape[:-1]).masked_fill(targets == head.IGNORE, 0)
