"""Gates to pass to a model's forward instead of its own: forced ones, and recording ones."""

from __future__ import annotations

import torch
from torch import Tensor

from amor.gates.base import Evidence, Gate, Nothing, Verdict
from amor.models.amor import Amor


class ForcedGate(Gate[Nothing]):
    """Fires everywhere (True), nowhere (False), or by a mask [rows, columns] of the tokens read."""

    kind = "forced"
    Options = Nothing

    def __init__(self, fire: bool | Tensor):
        super().__init__(0, Nothing(), 0)
        self.fire = torch.as_tensor(fire)

    def forward(self, evidence: Evidence) -> Verdict:
        """Fire as given, whatever the evidence."""
        fire = self.fire.to(evidence.position.device).expand_as(evidence.position)
        return Verdict(fire, fire.float())


class RecordingGate(Gate[Nothing]):
    """Decides as another gate does; records fields of its evidence (e.g. "entropy") per call."""

    kind = "recording"
    Options = Nothing

    def __init__(self, gate: Gate, *names: str):
        super().__init__(0, Nothing(), 0)
        self.gate, self.names = gate, names
        self.recorded: dict[str, list[Tensor]] = {name: [] for name in names}  # one tensor per call

    @property
    def needs(self) -> frozenset[str]:
        """What the other gate needs, and what is recorded."""
        return self.gate.needs | frozenset(self.names)

    @property
    def threshold(self) -> Tensor:
        """That of the other gate."""
        return self.gate.threshold

    def forward(self, evidence: Evidence) -> Verdict:
        """The verdict of the other gate; the evidence is recorded."""
        for name in self.names:
            self.recorded[name].append(getattr(evidence, name))
        return self.gate(evidence)

    def values(self, name: str, dim: int) -> Tensor:
        """All calls concatenated along dim: 0 where each had other rows, 1: other columns."""
        return torch.cat(self.recorded[name], dim)


def own_gates(model: Amor) -> list[Gate]:
    """The model's own gates, one per block."""
    return [block.gate for block in model.each_block()]


def force_all(model: Amor, fire: bool) -> list[Gate]:
    """Gates that open (True) or close (False) every block on every token."""
    return [ForcedGate(fire) for _ in model.each_block()]
