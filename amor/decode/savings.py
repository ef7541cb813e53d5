"""The exact savings of decode, each a switch: switched off it can be measured, and no decision changes either way."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Savings:
    compiled: bool = True  # steps by programs in native code, weights packed for few rows; False: the model's forward
    joint: bool = True  # one pass over the head for every probe to come and the output, again only after a firing
    foresee: bool = True  # where blocks fire together, after one they are run as if all did, and one pass over the head tells
    sparse: bool = True  # queries, attention and W_O only for rows that fire; False: for all, and masked
    last: bool = True  # in prefill the last block looks at the last token only
    streamed: bool = True  # in prefill entropy comes from running sums; False: from a logit a token and word

    @classmethod
    def none(cls) -> "Savings":
        """The naive way: K + 1 readings of the head, attention everywhere."""
        return cls(compiled=False, joint=False, foresee=False, sparse=False, last=False, streamed=False)

    @classmethod
    def authors(cls) -> "Savings":
        """As the authors' released code decodes: K + 1 readings of the head, attention only where the gate fires."""
        return cls(compiled=False, joint=False, foresee=False, sparse=True, last=False, streamed=False)
