"""Where the evidence of gates comes from: the interface, and direct readings of the head.

Another implementation may read the head earlier or for several blocks at once
(amor/decode/reader.py); it may never return a number that changes a decision.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from amor.errors import AmorError
from amor.gates.base import Evidence, Verdict
from amor.layout import Layout
from amor.ops import head

if TYPE_CHECKING:
    from amor.models.amor import Amor

Residuals = Callable[
    [], tuple[Tensor, Tensor]
]  # the residual if the block stays closed, and if it fires


class Probing(Protocol):
    """Returns the evidence for the gate of one block."""

    def __call__(
        self,
        index: int,  # of the block
        h: Tensor,  # [B, T, D] the residual before it
        x: Tensor,  # [B, T, D] the block's input, without gradient
        layout: Layout,
        needs: frozenset[str],  # of its gate
        opened: Residuals,
        before: Verdict | None,  # of the block before; None at the first
    ) -> Evidence: ...


class DirectProbe:
    """Reads the head once per block, for every token of the call.

    Where gates read the output vector (`probe = "final"`), it stays the same until a token fires,
    so later blocks read again only tokens that fired.
    """

    def __init__(
        self,
        model: Amor,
        targets: Tensor | None = None,
        read: Callable[..., head.HeadStats] = head.read,
    ):
        self.model, self.targets, self.read = model, targets, read
        self.readings: dict[str, Tensor] = {}  # [B, T] each
        self.stale = torch.zeros(0, dtype=torch.bool)  # [B, T] tokens that fired since

    @torch.no_grad()
    def __call__(
        self,
        index: int,
        h: Tensor,
        x: Tensor,
        layout: Layout,
        needs: frozenset[str],
        opened: Residuals,
        before: Verdict | None = None,
    ) -> Evidence:
        names = needs & {"entropy", "margin"}
        self._invalidate(h, before)
        if names:
            self._update(h, x, layout, names)
        values = {name: self.readings[name] for name in names}
        if "gain" in needs:
            values["gain"] = self._gain(opened())
        return Evidence(x, layout.positions, **values, before=before)

    def _invalidate(self, h: Tensor, before: Verdict | None) -> None:
        """Mark tokens that fired as stale; drop all readings where they cannot be kept."""
        final = self.model.config.blocks.probe == "final" and before is not None
        # on a GPU, selecting the tokens that fired would synchronise a training step
        waits = h.requires_grad and h.device.type != "cpu"
        if not final or waits or any(t.shape != h.shape[:2] for t in self.readings.values()):
            self.readings = {}
        if self.readings and before is not None:
            self.stale = self.stale | before.fire

    def _update(self, h: Tensor, x: Tensor, layout: Layout, names: frozenset[str]) -> None:
        """Read the head for the tokens whose readings are missing or stale."""
        real = layout.valid
        every = torch.ones(h.shape[:2], dtype=torch.bool, device=h.device) if real is None else real
        whole = not names <= self.readings.keys()
        where = (every if whole else self.stale).flatten()
        some = slice(None) if whole and real is None else where
        vectors = self.model.probe_vector(h.flatten(0, 1)[some], x.flatten(0, 1)[some])
        if whole or len(vectors):
            stats = self.read(
                vectors,
                self.model.head_weight,
                entropy="entropy" in names,
                margin="margin" in names,
            )
            # entropy over log(vocab), so that one threshold means the same for every vocabulary
            scale = {"entropy": math.log(self.model.config.vocab), "margin": 1.0}
            old, self.readings = {} if whole else self.readings, {}
            for name in names:
                values = getattr(stats, name) / scale[name]
                into = values.new_zeros(h.shape[:2]) if whole else old[name]
                self.readings[name] = into.masked_scatter(where.view_as(into), values)
        self.stale = torch.zeros_like(every)

    def _gain(self, residuals: tuple[Tensor, Tensor]) -> Tensor:
        """[B, T] nats of the true next token gained by firing this block, the later ones closed."""
        targets, final = self.targets, self.model.output_vector
        if targets is None:
            raise AmorError(
                "the oracle gate needs the true next tokens: call the model with targets"
            )
        if targets.shape != residuals[0].shape[:2]:
            raise AmorError(
                'the oracle gate decides on every token: call the model with keep="all"'
            )
        closed, opened = (
            self.read(final(h).flatten(0, 1), self.model.head_weight, targets.flatten()).nll
            for h in residuals
        )
        assert closed is not None and opened is not None
        return (closed - opened).view_as(targets)
