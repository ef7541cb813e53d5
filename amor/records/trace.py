"""What a model did to a text, token by token: what amor/judge/trace.py finds and pages, strips and
figures show."""

from typing import Annotated

import msgspec
from msgspec import Meta

from amor import typed
from amor.records import MOST_BLOCKS, Number, Record, Steps, Words

Rates = tuple[typed.Share, ...]


class Guess(Record, frozen=True):
    """A likely next token and its probability."""

    text: Words
    p: typed.Share


class Chances(Record, frozen=True):
    """The probability of a token with the gates as they are, closed everywhere and open
    everywhere."""

    as_is: typed.Share
    closed: typed.Share
    open: typed.Share


class Token(Record, frozen=True):
    """As read: entropies and decisions, one a block. As predicted: surprise and probabilities,
    which the first token lacks."""

    text: Words
    entropy: tuple[Number, ...]
    fire: tuple[bool, ...]
    final_entropy: Number
    guesses: tuple[Guess, ...] = ()
    surprise: Number | None = None
    p: Chances | None = None
    id: Steps = 0
    kind: Words = ""
    rare: bool = False

    @property
    def entropies(self) -> tuple[float, ...]:
        """One per block; of a model without blocks that of the output."""
        return self.entropy or (self.final_entropy,)


class Losses(Record, frozen=True):
    """Nats a token; None for a text of one token."""

    as_is: Number | None = None
    closed: Number | None = None
    open: Number | None = None


class ClassRow(Record, frozen=True):
    """The tokens of a class: how many, and their means."""

    name: Words = msgspec.field(name="class")
    count: Steps
    entropy: tuple[Number, ...]
    fire_rate: Rates
    surprise: Number | None = None


class Trace(Record, frozen=True):
    """One text, token by token, with its means."""

    tokens: tuple[Token, ...]
    thresholds: tuple[Number | None, ...]
    blocks: Annotated[int, Meta(ge=0, le=MOST_BLOCKS)]
    title: Words = ""
    model: Words = ""
    gate: Words | None = None
    fire_rate: Rates = ()
    loss: Losses = Losses()
    summary: tuple[ClassRow, ...] = ()
    given: Steps = 0  # tokens at the beginning that the model did not write

    def __post_init__(self) -> None:
        if not self.tokens:
            raise ValueError("a trace has at least one token")
        lengths = {
            len(self.thresholds),
            *(len(each) for token in self.tokens for each in (token.entropy, token.fire)),
        }
        if lengths != {self.blocks}:
            raise ValueError(
                f"of {self.blocks} blocks, but thresholds, entropies and decisions are of "
                f"{sorted(lengths)}"
            )


class Traces(typed.File, frozen=True):
    """trace.json: the texts that were traced."""

    traces: tuple[Trace, ...]
