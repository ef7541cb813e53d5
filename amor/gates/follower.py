"""One decision for all blocks: gates after the first fire where the first one did."""

from collections.abc import Sequence

from torch import Tensor

from amor.gates.base import Evidence, Gate, Nothing, Verdict


class Follower(Gate[Nothing]):
    """Repeats the decision of the previous block.

    It has no buffers of its own; kind and threshold are its leader's.
    """

    Options = Nothing

    def __init__(self, leader: Gate):
        super().__init__(0, Nothing(), 0)
        self.kind = leader.kind
        # in a tuple, so that torch does not count the leader's numbers a second time
        self._leader = (leader,)

    @property
    def decider(self) -> Gate:
        return self._leader[0]

    @property
    def threshold(self) -> Tensor:
        return self.decider.threshold

    def forward(self, evidence: Evidence) -> Verdict:
        assert evidence.before is not None
        return evidence.before

    def aim(self, rate: float | None) -> None:
        self.decider.aim(rate)


def share_decision(own: Sequence[Gate], gates: Sequence[Gate]) -> list[Gate]:
    """`gates` as replacements of a model's `own`, one per block.

    Where one of its own is a Follower, the first replacement decides for that block too.
    """
    return [
        Follower(gates[0]) if isinstance(mine, Follower) else gate
        for mine, gate in zip(own, gates, strict=True)
    ]
