"""What gates are to predict, measured on a sample of the tokens of one forward: the gain of firing, or the entropy of the head.

The gain of a token is the nll of its true next token with blocks closed less that with them fired. A gate of its own a block
(decide = "each"): this block, those before it as they decided, those after it closed. One gate for all ("once"): all blocks
against none. Keys and values are those of the forward, so a sample costs its own queries and readings of the head alone; of a
token that did not fire, blocks after the first have kept the key and value of the closed residual.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from amor.errors import AmorError
from amor.gates.base import Gate
from amor.gates.once import Follower
from amor.layout import Layout
from amor.ops import head

if TYPE_CHECKING:
    from amor.models.amor import Amor
    from amor.models.block import Place


@dataclass(frozen=True)
class Measured:
    """The sample of one gate."""

    x: Tensor  # [n, D] what its block read
    value: Tensor  # [n] gain in nats (0 where the loss asks for no next token), or normalised entropy


class Measure:
    """Goes through the blocks with one forward and keeps, at the sample, what is needed to fire them afterwards."""

    def __init__(self, model: Amor, columns: Tensor, targets: Tensor | None, layout: Layout):
        if targets is None or layout.valid is not None:
            raise AmorError("gains are measured against true next tokens, in rows without pads: call the model with targets")
        rows = torch.arange(len(columns), device=columns.device)[:, None].expand_as(columns)
        self.model, self.here = model, (rows.flatten(), columns.flatten())
        self.targets = targets[self.here]
        self.h: list[Tensor] = []  # a block: the residual before it, [n, D]
        self.x: list[Tensor] = []
        self.fired: list[Callable[[Tensor, Tensor, Place], Tensor]] = []

    def __call__(self, h: Tensor, x: Tensor, fired: Callable[[Tensor, Tensor, Place], Tensor]) -> None:
        self.h.append(h.detach()[self.here])
        self.x.append(x.detach()[self.here])
        self.fired.append(fired)

    @torch.no_grad()
    def found(self) -> tuple[Measured | None, ...]:
        """One per block, None where its gate measures nothing."""
        gates = [block.gate for block in self.model.each_block()]
        values = self._gains([k for k, gate in enumerate(gates) if gate.measures == "gain"], gates)
        values |= self._entropies([k for k, gate in enumerate(gates) if gate.measures == "entropy"])
        return tuple(Measured(self.x[k], values[k]) if k in values else None for k in range(len(gates)))

    def _gains(self, blocks: list[int], gates: Sequence[Gate]) -> dict[int, Tensor]:
        """[n] nats that firing saves, by block."""
        if not blocks:
            return {}
        nll = self._nll(torch.stack([h for k in blocks for h in (self.h[k], self._opened(k, gates))]))
        return dict(zip(blocks, nll[0::2] - nll[1::2], strict=True))

    def _entropies(self, blocks: list[int]) -> dict[int, Tensor]:
        """[n] normalised entropy of the head, by block."""
        if not blocks:
            return {}
        vectors = torch.stack([self.model.asked(self.h[k], self.x[k]) for k in blocks])
        entropy = head.read(vectors.flatten(0, 1), self.model.head_weight, entropy=True).entropy
        assert entropy is not None
        return dict(zip(blocks, (entropy / math.log(self.model.config.vocab)).view(vectors.shape[:2]), strict=True))

    def _opened(self, first: int, gates: Sequence[Gate]) -> Tensor:
        """The residual after block `first` fired, and after every block that follows its gate."""
        h = self.h[first]
        for index in range(first, len(gates)):
            if index == first or isinstance(gates[index], Follower):
                h = self.fired[index](h, self.model.block_input(index, h), self.here)
        return h

    def _nll(self, h: Tensor) -> Tensor:
        """[..., n, D] residuals -> [..., n] nats of the true next tokens, 0 where there is none."""
        targets = self.targets.expand(h.shape[:-1])
        found = head.read(self.model.output_vector(h).flatten(0, -2), self.model.head_weight, targets.flatten()).nll
        assert found is not None
        return found.view(h.shape[:-1]).masked_fill(targets == head.IGNORE, 0)
