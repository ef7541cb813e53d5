"""CALM's measure of uncertainty, with the paper's threshold.

The score is one minus the difference of the two best probabilities.
"""

from amor.gates.base import Evidence, MedianGate, Verdict
from amor.program import Program, Vector


class Margin(MedianGate):
    """Fires where the two best tokens are close."""

    kind = "margin"
    needs = frozenset({"margin"})

    def forward(self, evidence: Evidence) -> Verdict:
        assert evidence.margin is not None
        return self.judge(1 - evidence.margin)

    def program(self, p: Program, x: Vector, score: Vector) -> None:
        p.head("margin", score, shift=1.0, sign=-1.0)
