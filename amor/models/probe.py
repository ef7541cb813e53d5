"""How a gate comes to know what the head says: the strategy a model asks at every block, and the plain one.

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
from amor.gates.base import Evidence, Verdict
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
        before: Verdict | None,  # of the block before; None at the first
    ) -> Evidence: ...


class DirectProbe:
    """One reading of the head a block, of every token of the call.

    Where gates ask about the final norm of the residual, a token's vector stays what it is until it fires: later blocks read
    again only those that did.
    """

    def __init__(self, model: Amor, targets: Tensor | None = None, read: Callable[..., head.HeadStats] = head.read):
        self.model, self.targets, self.read = model, targets, read
        self.known: dict[str, Tensor] = {}  # [B, T] each, of the last reading
        self.moved = torch.zeros(0, dtype=torch.bool)  # [B, T] where tokens fired since

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
        self._remember(h, names, before)
        if names:
            self._ask(h, x, layout, names)
        seen = {name: self.known[name] for name in names}
        if "gain" in needs:
            seen["gain"] = self._gain(opened())
        return Evidence(x, layout.positions, **seen, before=before)

    def _remember(self, h: Tensor, names: frozenset[str], before: Verdict | None) -> None:
        """Keep of what is known only what still stands."""
        final = self.model.config.blocks.probe == "final" and before is not None
        # on a GPU asking which fired would hold up the queue of a training step
        waits = h.requires_grad and h.device.type != "cpu"
        if not final or waits or any(known.shape != h.shape[:2] for known in self.known.values()):
            self.known = {}
        if self.known and before is not None:
            self.moved = self.moved | before.fire

    def _ask(self, h: Tensor, x: Tensor, layout: Layout, names: frozenset[str]) -> None:
        """Read the head for the tokens of which something is not known."""
        every = layout.valid if layout.valid is not None else torch.ones(h.shape[:2], dtype=torch.bool, device=h.device)
        whole = not names <= self.known.keys()
        if whole:
            self.known = {}
        where = (every if whole else self.moved).flatten()
        some = slice(None) if whole and layout.valid is None else where
        asked = self.model.asked(h.flatten(0, 1)[some], x.flatten(0, 1)[some])
        if whole or len(asked):
            reading = self.read(asked, self.model.head_weight, entropy="entropy" in names, margin="margin" in names)
            # entropy over log(vocab), so that one threshold means the same for every vocabulary
            scale = {"entropy": math.log(self.model.config.vocab), "margin": 1.0}
            self.known = {name: held for name, held in self.known.items() if name in names}  # of others this is not read again
            for name in names:
                values = getattr(reading, name) / scale[name]
                held = values.new_zeros(h.shape[:2]) if whole else self.known[name]
                self.known[name] = held.masked_scatter(where.view_as(held), values)
        self.moved = torch.zeros_like(every)

    def _gain(self, residuals: tuple[Tensor, Tensor]) -> Tensor:
        """[B, T] nats of the true next token gained by firing this block, the later ones closed."""
        targets, final = self.targets, self.model.output_vector
        if targets is None:
            raise AmorError("the oracle gate needs the true next tokens: call the model with targets")
        if targets.shape != residuals[0].shape[:2]:
            raise AmorError('the oracle gate judges every token: call the model with keep="all"')
        closed, opened = (self.read(final(h).flatten(0, 1), self.model.head_weight, targets.flatten()).nll for h in residuals)
        assert closed is not None and opened is not None
        return (closed - opened).view_as(targets)
