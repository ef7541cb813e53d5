"""A gate that is not yet asked: it scores and learns, and its block fires everywhere."""

from dataclasses import replace

import torch
from torch import Tensor

from amor.gates.base import Evidence, Gate, Nothing, Verdict


class Opened(Gate[Nothing]):
    """Another gate that fires on every token. It has no numbers of its own."""

    kind = "opened"
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
