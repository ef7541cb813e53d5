"""The exact savings of decode as switches: switched off, each can be measured; none changes a
decision.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Savings:
    """Which savings an engine uses; all by default."""

    compiled: bool = True  # steps in native code, weights packed; False: the model's forward
    joint: bool = True  # one pass over the head for all known probe vectors and the output
    speculate: bool = True  # where blocks fire together, run the later ones ahead and read once
    sparse: bool = True  # queries, attention and W_O only for rows that fire; False: masked
    last: bool = True  # in prefill the last block computes the last token only
    streamed: bool = True  # in prefill entropies from running sums; False: from all logits

    @classmethod
    def none(cls) -> "Savings":
        """The naive way: K + 1 readings of the head, attention everywhere."""
        return cls(*[False] * 6)

    @classmethod
    def authors(cls) -> "Savings":
        """As the authors' released code: K + 1 readings of the head, attention where gates fire."""
        return cls(False, False, False, sparse=True, last=False, streamed=False)
