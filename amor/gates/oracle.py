"""Fires where attention lowers the loss of the true next token.

An upper bound for studies: it needs the next token.
"""

from amor.gates.base import Evidence, Gate, Nothing, Verdict


class Oracle(Gate[Nothing]):
    """Fires where firing this block, later ones closed, lowers the loss."""

    kind = "oracle"
    Options = Nothing
    needs = frozenset({"gain"})

    def forward(self, evidence: Evidence) -> Verdict:
        assert evidence.gain is not None
        return Verdict(evidence.gain > 0, evidence.gain)
