"""How a gate comes to know what the tied head says: the strategy a model asks at every block, and the plain one.

A strategy may read the head earlier, more cheaply or for several blocks at once (amor/decode/reader.py does); it may never
give a gate a number that would change its decision.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from amor.errors import AmorError
from amor.gates.base import Evidence
from amor.layout import Layout
from amor.ops import head

if TYPE_CHECKING:
    from amor.models.amor import Amor

Residuals = Callable[[], tuple[Tensor, Tensor]]  # the residual if the block stays closed, and if it fires


class Probing(Protocol):
    def __call__(
        self,
        index: int,  # of the block that asks
        h: Tensor,  # [B, T, D] the residual before it
        x: Tensor,  # [B, T, D] what the block reads of it, without gradient
        layout: Layout,
        needs: frozenset[str],  # of its gate
        opened: Residuals,
    ) -> Evidence: ...


class DirectProbe:
    """One reading of the head a block, of every token of the call."""

    def __init__(self, model: Amor, targets: Tensor | None = None, read: Callable[..., head.HeadStats] = head.read):
        self.model, self.targets, self.read = model, targets, read

    @torch.no_grad()
    def __call__(self, index: int, h: Tensor, x: Tensor, layout: Layout, needs: frozenset[str], opened: Residuals) -> Evidence:
        seen: dict[str, Tensor] = {}
        if needs & {"entropy", "margin"}:
            real = slice(None) if layout.valid is None else layout.valid.flatten()
            weight = self.model.embed.weight
            reading = self.read(x.flatten(0, 1)[real], weight, entropy="entropy" in needs, margin="margin" in needs)
            if reading.entropy is not None:
                # over log(vocab), so that one threshold means the same for every vocabulary
                seen["entropy"] = _spread(reading.entropy / math.log(self.model.config.vocab), layout, x)
            if reading.margin is not None:
                seen["margin"] = _spread(reading.margin, layout, x)
        if "gain" in needs:
            seen["gain"] = self._gain(opened())
        return Evidence(x, layout.positions, **seen)

    def _gain(self, residuals: tuple[Tensor, Tensor]) -> Tensor:
        """[B, T] nats of the true next token gained by firing this block, the later ones closed."""
        targets, final_norm = self.targets, self.model.final_norm
        if targets is None:
            raise AmorError("the oracle gate needs the true next tokens: call the model with targets")
        if targets.shape != residuals[0].shape[:2]:
            raise AmorError('the oracle gate judges every token: call the model with keep="all"')
        assert final_norm is not None
        closed, opened = (
            self.read(final_norm(h).flatten(0, 1), self.model.embed.weight, targets.flatten()).nll for h in residuals
        )
        assert closed is not None and opened is not None
        return (closed - opened).view_as(targets)


def _spread(values: Tensor, layout: Layout, x: Tensor) -> Tensor:
    """[real tokens] -> [B, T], 0 at pads."""
    if layout.valid is None:
        return values.view(x.shape[:2])
    out = values.new_zeros(x.shape[:2])
    out[layout.valid] = values
    return out
