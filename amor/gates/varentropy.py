"""The variance of surprise as the score, with the paper's threshold.

The score is the variance of -log p under the head's distribution of the next token: 0 where it is
certain and where it is uniform, large where it hesitates between a few likely tokens and many
unlikely ones. It is normalised by log(vocab)^2, as the entropy is by log(vocab). It needs all
logits, so it costs more than the entropy.
"""

from amor.gates.base import Evidence, MedianGate, Verdict


class Varentropy(MedianGate):
    """Fires where the variance of -log p exceeds the threshold."""

    kind = "varentropy"
    needs = frozenset({"varentropy"})

    def forward(self, evidence: Evidence) -> Verdict:
        assert evidence.varentropy is not None
        return self.judge(evidence.varentropy)
