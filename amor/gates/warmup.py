"""The gate of a warm-up: it scores and learns while its block fires everywhere.

A recipe's `open_steps` is the length of the warm-up.
"""

from dataclasses import replace

import torch
from torch import Tensor

from amor.gates.base import Evidence, Gate, Nothing, Verdict


class ForcedOpen(Gate[Nothing]):
    """Wraps a gate: its scores and statistics, but every token fires.

    It has no buffers of its own.
    """

    kind = "forced_open"
    Options = Nothing

    def __init__(self, gate: Gate):
        super().__init__(0, Nothing(), 0)
        self._gate = (gate,)  # in a tuple, so that torch does not count its numbers a second time

    @property
    def needs(self) -> frozenset[str]:
        return self._gate[0].needs

    @property
    def updates_in_forward(self) -> bool:
        return self._gate[0].updates_in_forward

    def observe(self, scores: Tensor) -> None:
        self._gate[0].observe(scores)

    @property
    def threshold(self) -> Tensor:
        return self._gate[0].threshold

    def forward(self, evidence: Evidence) -> Verdict:
        verdict = self._gate[0](evidence)
        return replace(verdict, fire=torch.ones_like(verdict.fire))
