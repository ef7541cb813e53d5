"""Evidence of gates by reading the head directly: one reading per block, for all its tokens.

Decode reads it for several blocks at once (amor/decode/evidence.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from amor.errors import AmorError
from amor.gates.base import Adaptive, Evidence, Gate, Verdict
from amor.gates.evidence import HEAD_EVIDENCE, present, read_evidence
from amor.ops import head

if TYPE_CHECKING:
    from amor.models.block import TorchBlocks

Read = Callable[..., head.HeadStats]


class HeadEvidence:
    """Reads the head once per block, for every token of the call.

    Where gates read the output vector, it stays the same until a token fires, so later blocks read
    again only tokens that fired.
    """

    def __init__(
        self, blocks: TorchBlocks, weight: Tensor, targets: Tensor | None, read: Read = head.read
    ):
        """weight: [V, D] of the head; targets: [B, T] true next tokens, for the oracle gate."""
        self.blocks, self.weight, self.targets, self.read = blocks, weight, targets, read
        self.readings: dict[str, Tensor] = {}  # [B, T] each
        self.stale = torch.zeros(0, dtype=torch.bool)  # [B, T] tokens that fired since

    def decide(
        self, index: int, gate: Gate, h: Tensor, x: Tensor, before: Verdict | None
    ) -> Verdict:
        """The decision on every token; pads never fire.

        A gate that updates its statistics in every training forward does so before it; so does any
        gate that follows its scores and has no statistics yet.
        """
        evidence = self.evidence(index, gate, h, x.detach(), before)
        verdict, real = gate(evidence), self.blocks.layout.valid
        if torch.is_grad_enabled() and self.blocks.training and _observes(gate):
            gate.observe(verdict.score if real is None else verdict.score[real])
            verdict = gate(evidence)
        fire = verdict.fire if real is None else verdict.fire & real
        return replace(verdict, fire=fire, score=verdict.score.detach())

    @torch.no_grad()
    def evidence(
        self, index: int, gate: Gate, h: Tensor, x: Tensor, before: Verdict | None
    ) -> Evidence:
        """What the gate of block `index` needs, for every token."""
        names = gate.needs & HEAD_EVIDENCE.keys()
        self._invalidate(h, before)
        if names:
            self._update(h, x, names)
        values = {name: self.readings[name] for name in names}
        if "gain" in gate.needs:
            values["gain"] = self._gain(h, self.blocks.opened(index, h, x))
        return Evidence(x, self.blocks.layout.positions, **values, before=before)

    def _invalidate(self, h: Tensor, before: Verdict | None) -> None:
        """Mark tokens that fired as stale; drop all readings where they cannot be kept."""
        kept = self.blocks.norms.probe_output and before is not None
        # on a GPU, selecting the tokens that fired would synchronise a training step
        waits = h.requires_grad and h.device.type != "cpu"
        if not kept or waits or any(t.shape != h.shape[:2] for t in self.readings.values()):
            self.readings = {}
        if self.readings and before is not None:
            self.stale = self.stale | before.fire

    def _update(self, h: Tensor, x: Tensor, names: frozenset[str]) -> None:
        """Read the head for the tokens whose readings are missing or stale."""
        real = self.blocks.layout.valid
        every = torch.ones(h.shape[:2], dtype=torch.bool, device=h.device) if real is None else real
        whole = not names <= self.readings.keys()
        where = (every if whole else self.stale).flatten()
        some = slice(None) if whole and real is None else where
        vectors = self.blocks.norms.probe(h.flatten(0, 1)[some], x.flatten(0, 1)[some])
        if whole or len(vectors):
            values = read_evidence(vectors, self.weight, names, self.read)
            old, self.readings = {} if whole else self.readings, {}
            for name, value in values.items():
                into = value.new_zeros(h.shape[:2]) if whole else old[name]
                self.readings[name] = into.masked_scatter(where.view_as(into), value)
        self.stale = torch.zeros_like(every)

    def _gain(self, closed: Tensor, opened: Tensor) -> Tensor:
        """[B, T] nats of the true next token gained by firing this block, the later ones closed."""
        targets = self.targets
        if targets is None:
            raise AmorError(
                "the oracle gate needs the true next tokens: call the model with targets"
            )
        if targets.shape != closed.shape[:2]:
            raise AmorError(
                'the oracle gate decides on every token: call the model with keep="all"'
            )
        nll = (
            self.read(self.blocks.norms.output(h).flatten(0, 1), self.weight, targets.flatten()).nll
            for h in (closed, opened)
        )
        return (present(next(nll)) - present(next(nll))).view_as(targets)


def _observes(gate: Gate) -> bool:
    """Whether a training forward updates the statistics of a gate before it decides."""
    if gate.updates_in_forward:
        return True
    if torch.compiler.is_compiling() or not isinstance(gate, Adaptive):
        return False
    return gate.without_statistics()
