"""One decision for all blocks: those after the first have a gate that fires where the one before it did."""

from collections.abc import Sequence

from torch import Tensor

from amor.gates.base import Evidence, Gate, Nothing, Verdict


class Follower(Gate[Nothing]):
    """Has no numbers of its own; what it tells of itself is what the gate it follows tells."""

    Options = Nothing

    def __init__(self, leader: Gate):
        super().__init__(0, Nothing(), 0)
        self.kind = leader.kind
        self._leader = (leader,)  # in a tuple, so that torch does not count the leader's numbers a second time

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


def led(own: Sequence[Gate], gates: Sequence[Gate]) -> list[Gate]:
    """Other gates for a model's own: where one of those follows, the first of the others decides for its block too."""
    return [Follower(gates[0]) if isinstance(mine, Follower) else gate for mine, gate in zip(own, gates, strict=True)]
