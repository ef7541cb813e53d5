"""The paper's gate: attention runs where the normalised entropy of the next token exceeds mu + kappa sigma."""

from amor.gates.base import Evidence, MedianGate, Verdict


class Entropy(MedianGate):
    kind = "entropy"
    needs = frozenset({"entropy"})

    def forward(self, evidence: Evidence) -> Verdict:
        assert evidence.entropy is not None
        return self.judge(evidence.entropy)
