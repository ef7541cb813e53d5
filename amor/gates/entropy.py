"""The paper's gate.

Attention runs where the normalised entropy of the next token exceeds mu + kappa sigma.
"""

from collections.abc import Sequence

from amor.gates.base import Adaptive, AdaptiveT, Evidence, MedianGate, MedianOptions, Verdict
from amor.program import Program, Vector


class ByEntropy(Adaptive[AdaptiveT]):
    """Fires where the normalised entropy exceeds the threshold, whichever that is."""

    needs = frozenset({"entropy"})

    def forward(self, evidence: Evidence) -> Verdict:
        assert evidence.entropy is not None
        return Verdict(evidence.entropy > self.threshold, evidence.entropy)

    def program(self, p: Program, x: Vector, score: Vector) -> None:
        p.head("entropy", score)

    def fires(self, scores: Sequence[float], positions: Sequence[int]) -> list[bool]:
        return self.above_threshold(scores)


class Entropy(ByEntropy[MedianOptions], MedianGate):
    """The paper's gate: kind "entropy"."""

    kind = "entropy"
