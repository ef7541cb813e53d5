"""A Mixture-of-Depths router: a learned score, a firing rate, a straight-through gradient.

Mixture-of-Depths takes the best k tokens of a sequence, which looks ahead; here the threshold is a
quantile of past scores, so a decision needs this token only.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from amor.gates.base import Adaptive, EMAOptions, Evidence, Verdict
from amor.parts import touched
from amor.program import NoProgramError, Program, Vector
from amor.typed import Share


@dataclass(frozen=True)
class LearnedOptions(EMAOptions):
    """The firing rate, and how fast the threshold follows the scores."""

    rate: Share = 0.4  # fraction of tokens that fire; the paper's gate fires on about 40 %

    def parameters(self, width: int) -> int:
        """Weights that the optimiser trains."""
        return width


class Learned(Adaptive[LearnedOptions]):
    """A linear score trained by the loss, through a straight-through gradient."""

    kind = "learned"
    Options = LearnedOptions

    def __init__(self, width: int, options: LearnedOptions, salt: int):
        super().__init__(width, options, salt)
        self.router = nn.Linear(width, 1, bias=False)

    def trained_threshold(self) -> Tensor:
        return self.quantile(1 - self.options.rate)

    def forward(self, evidence: Evidence) -> Verdict:
        score = self.router(evidence.x).squeeze(-1).float()
        fire = score > self.threshold
        soft = torch.sigmoid(score - self.threshold)
        return Verdict(fire, score.detach(), fire + (soft - soft.detach()))

    def fires(self, scores: Sequence[float], positions: Sequence[int]) -> list[bool]:
        return self.above_threshold(scores)

    def program(self, p: Program, x: Vector, score: Vector) -> None:
        if touched(self.router):
            raise NoProgramError(touched(self.router))
        p.dot(x, self.router.weight[0], out=score)

    def decision_tensors(self) -> tuple[Tensor, ...]:
        return *super().decision_tensors(), self.router.weight
