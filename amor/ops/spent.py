"""FLOPs done and bytes read, counted by the operators that do and read them, while someone counts.

    with counting() as spent:
        session.step(tokens)
    spent.flops, spent.bytes, spent.by["head"]

FLOPs are those of products and recurrences, bytes those of weights, keys, values and recurrent states: what Cost declares.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Spent:
    by: dict[str, tuple[float, float]] = field(default_factory=dict)  # what for -> FLOPs, bytes

    @property
    def flops(self) -> float:
        return sum(flops for flops, _ in self.by.values())

    @property
    def bytes(self) -> float:
        return sum(read for _, read in self.by.values())


_open: list[Spent] = []


@contextmanager
def counting() -> Iterator[Spent]:
    spent = Spent()
    _open.append(spent)
    try:
        yield spent
    finally:
        _open.remove(spent)


def someone_counts() -> bool:
    return bool(_open)


def spend(what: str, flops: float, read: float) -> None:
    for spent in _open:
        before = spent.by.get(what, (0.0, 0.0))
        spent.by[what] = before[0] + flops, before[1] + read
