"""Other gates inside a model, for the engine, which asks the model's blocks for theirs at every step."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from amor.gates.base import Gate
from amor.gates.words import chosen
from amor.models.amor import Amor


def regate(model: Amor, words: str | None = None, rate: float | None = None) -> None:
    """Exchange the gate of every block for the one asked for."""
    put(model, chosen([block.gate for block in model.each_block()], words, rate))


def put(model: Amor, gates: Sequence[Gate]) -> None:
    for block, gate in zip(model.each_block(), gates, strict=True):
        block.gate = gate


@contextmanager
def gated(model: Amor, gates: Sequence[Gate]) -> Iterator[None]:
    """The blocks of a model behind these gates, one a block; its own come back at the end, whatever happens."""
    own = [block.gate for block in model.each_block()]
    try:
        put(model, gates)
        yield
    finally:
        put(model, own)
