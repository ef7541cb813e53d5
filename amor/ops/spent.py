"""FLOPs done and bytes read, counted by the operators themselves inside `counting()`.

    with counting() as spent:
        session.step(tokens)
    spent.flops, spent.bytes, spent.by["head"]

FLOPs are those of products and recurrences, bytes those of weights, keys, values and recurrent
states, as `Cost` declares them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Spent:
    """The work counted so far."""

    # purpose, such as "head" or "products" -> FLOPs, bytes
    by: dict[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def flops(self) -> float:
        """FLOPs of all purposes."""
        return sum(flops for flops, _ in self.by.values())

    @property
    def bytes(self) -> float:
        """Bytes read for all purposes."""
        return sum(read for _, read in self.by.values())


_open: list[Spent] = []


@contextmanager
def counting() -> Iterator[Spent]:
    """Count what operators do inside a `with`; may be nested."""
    spent = Spent()
    _open.append(spent)
    try:
        yield spent
    finally:
        _open.remove(spent)


def someone_counts() -> bool:
    """Whether any `counting()` is open, so that counting is worth its time."""
    return bool(_open)


def spend(what: str, flops: float, read: float) -> None:
    """Add FLOPs and bytes read to every open count."""
    for spent in _open:
        before = spent.by.get(what, (0.0, 0.0))
        spent.by[what] = before[0] + flops, before[1] + read
