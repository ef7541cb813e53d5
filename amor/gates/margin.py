"""CALM's measure of doubt: one minus the distance between the two best probabilities, with the same moving threshold."""

from amor.gates.base import Evidence, MedianGate, Verdict


class Margin(MedianGate):
    kind = "margin"
    needs = frozenset({"margin"})

    def forward(self, evidence: Evidence) -> Verdict:
        assert evidence.margin is not None
        return self.judge(1 - evidence.margin)
