"""Fires on every token: the ungated hybrid."""

import torch

from amor.gates.base import Evidence, Gate, Nothing, Verdict


class Always(Gate[Nothing]):
    """Fires on every token."""

    kind = "always"
    Options = Nothing
    by_position = True

    def forward(self, evidence: Evidence) -> Verdict:
        return Verdict(
            torch.ones_like(evidence.position, dtype=torch.bool),
            torch.ones_like(evidence.position, dtype=torch.float32),
        )
