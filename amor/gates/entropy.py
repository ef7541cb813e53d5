"""The paper's gate: attention runs where the normalised entropy of the next token exceeds mu + kappa sigma."""

from amor.gates.base import Evidence, Gate, MedianGate, Verdict


class ByEntropy(Gate):
    """Fires where the normalised entropy exceeds the threshold, whichever that is."""

    needs = frozenset({"entropy"})

    def forward(self, evidence: Evidence) -> Verdict:
        assert evidence.entropy is not None
        return Verdict(evidence.entropy > self.threshold, evidence.entropy)


class Entropy(ByEntropy, MedianGate):
    kind = "entropy"
