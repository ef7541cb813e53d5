"""Targets of gates that predict, measured on a sample of the tokens of one forward.

The target is the gain of firing, or the entropy of the head. The gain of a token is the nll of its
true next token with blocks closed minus the nll with them fired. With a gate per block (decide =
"each"): this block, those before it as they decided, those after it closed. With one gate for all
("once"): all blocks against none. Keys and values are those of the forward, so a sample costs only
its own queries and readings of the head; for a token that did not fire, blocks after the first keep
the key and value of the closed residual.
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

    x: Tensor  # [n, D] inputs of its block
    value: Tensor  # [n] gain in nats (0 where there is no target), or normalised entropy


class Measure:
    """Observes the blocks of one forward; afterwards fires them at the sampled tokens."""

    def __init__(self, model: Amor, columns: Tensor, targets: Tensor | None, layout: Layout):
        if targets is None or layout.valid is not None:
            raise AmorError(
                "gains are measured against true next tokens, in rows without pads: call the "
                "model with targets"
            )
        rows = torch.arange(len(columns), device=columns.device)[:, None].expand_as(columns)
        self.model, self.index = model, (rows.flatten(), columns.flatten())
        self.targets = targets[self.index]
        self.h: list[Tensor] = []  # per block: the residual before it, [n, D]
        self.x: list[Tensor] = []
        self.fired: list[Callable[[Tensor, Tensor, Place], Tensor]] = []

    def __call__(
        self, h: Tensor, x: Tensor, fired: Callable[[Tensor, Tensor, Place], Tensor]
    ) -> None:
        self.h.append(h.detach()[self.index])
        self.x.append(x.detach()[self.index])
        self.fired.append(fired)

    @torch.no_grad()
    def results(self) -> tuple[Measured | None, ...]:
        """One per block, None where its gate measures nothing."""
        gates = [block.gate for block in self.model.each_block()]
        values = self._gains([k for k, gate in enumerate(gates) if gate.measures == "gain"], gates)
        values |= self._entropies([k for k, gate in enumerate(gates) if gate.measures == "entropy"])
        return tuple(
            Measured(self.x[k], values[k]) if k in values else None for k in range(len(gates))
        )

    def _gains(self, blocks: list[int], gates: Sequence[Gate]) -> dict[int, Tensor]:
        """[n] nats that firing saves, by block."""
        if not blocks:
            return {}
        nll = self._nll(
            torch.stack([h for k in blocks for h in (self.h[k], self._residual_if_fired(k, gates))])
        )
        return dict(zip(blocks, nll[0::2] - nll[1::2], strict=True))

    def _entropies(self, blocks: list[int]) -> dict[int, Tensor]:
        """[n] normalised entropy of the head, by block."""
        if not blocks:
            return {}
        vectors = torch.stack([self.model.probe_vector(self.h[k], self.x[k]) for k in blocks])
        entropy = head.read(vectors.flatten(0, 1), self.model.head_weight, entropy=True).entropy
        assert entropy is not None
        return dict(
            zip(
                blocks,
                (entropy / math.log(self.model.config.vocab)).view(vectors.shape[:2]),
                strict=True,
            )
        )

    def _residual_if_fired(self, first: int, gates: Sequence[Gate]) -> Tensor:
        """The residual after block `first` fired, and after every block that follows its gate."""
        h = self.h[first]
        for index in range(first, len(gates)):
            if index == first or isinstance(gates[index], Follower):
                h = self.fired[index](h, self.model.block_input(index, h), self.index)
        return h

    def _nll(self, h: Tensor) -> Tensor:
        """[..., n, D] residuals -> [..., n] nats of the true next tokens, 0 where there is none."""
        targets = self.targets.expand(h.shape[:-1])
        vectors = self.model.output_vector(h).flatten(0, -2)
        nll = head.read(vectors, self.model.head_weight, targets.flatten()).nll
        assert nll is not None
        return nll.view(h.shape[:-1]).masked_fill(targets == head.IGNORE, 0)
