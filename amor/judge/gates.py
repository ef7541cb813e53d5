"""Gates to be handed to a model instead of its own: one that is told where to fire, one that watches another."""

from __future__ import annotations

import torch
from torch import Tensor

from amor.gates.base import Evidence, Gate, Nothing, Verdict
from amor.models.amor import Amor


class Told(Gate[Nothing]):
    """Fires where it is told: everywhere, nowhere, or at the marks of a mask as large as what the block reads."""

    kind = "told"
    Options = Nothing

    def __init__(self, fire: bool | Tensor):
        super().__init__(0, Nothing(), 0)
        self.fire = torch.as_tensor(fire)

    def forward(self, evidence: Evidence) -> Verdict:
        fire = self.fire.to(evidence.position.device).expand_as(evidence.position)
        return Verdict(fire, fire.float())


class Watched(Gate[Nothing]):
    """Decides as another gate does and keeps what it was shown, call after call: `more` names what to ask for besides."""

    kind = "watched"
    Options = Nothing

    def __init__(self, gate: Gate, *more: str):
        super().__init__(0, Nothing(), 0)
        self.gate, self.more = gate, more
        self.kept: dict[str, list[Tensor]] = {name: [] for name in more}

    @property
    def needs(self) -> frozenset[str]:
        return self.gate.needs | frozenset(self.more)

    @property
    def threshold(self) -> Tensor:
        return self.gate.threshold

    def forward(self, evidence: Evidence) -> Verdict:
        for name in self.more:
            self.kept[name].append(getattr(evidence, name))
        return self.gate(evidence)

    def seen(self, name: str, dim: int) -> Tensor:
        """All calls after each other: dim 0 for rows, 1 for the parts of a text."""
        return torch.cat(self.kept[name], dim)


def own_gates(model: Amor) -> list[Gate]:
    return [block.gate for block in model.each_block()]


def all_told(model: Amor, fire: bool) -> list[Gate]:
    """Every block open, or every block closed."""
    return [Told(fire) for _ in model.each_block()]
