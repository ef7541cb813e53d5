"""Fires on no token: the backbone alone."""

import torch

from amor.gates.base import Evidence, Gate, Nothing, Verdict


class Never(Gate[Nothing]):
    """Fires on no token: the backbone alone."""

    kind = "never"
    Options = Nothing
    by_position = True

    def forward(self, evidence: Evidence) -> Verdict:
        zero = torch.zeros_like(evidence.position, dtype=torch.float32)
        return Verdict(zero.bool(), zero)
