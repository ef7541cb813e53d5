"""RUN/findings.json: what the newest model of a run shows on held-out text."""

from typing import Annotated, Any

from msgspec import Meta

from amor import typed
from amor.records import MOST_BLOCKS, Number, Perplexity, Record, Steps, Words
from amor.records.trace import Trace
from amor.records.value import Saving


class Loss(Record, frozen=True):
    """Nats per token; None where the loss is not finite."""

    nll: Number | None
    perplexity: Perplexity | None


class HeldOutLoss(Loss, frozen=True):
    """The loss on held-out text, and how much of it was read."""

    split: Words
    tokens: Steps


class Histogram(Record, frozen=True):
    """The scores of one block: the share in each of equal bins between low and high."""

    fire: typed.Share
    threshold: Number | None
    low: Number
    high: Number
    shares: Annotated[tuple[typed.Share, ...], Meta(min_length=1, max_length=10_000)]
    median: Number

    def __post_init__(self) -> None:
        if not self.low < self.high:
            raise ValueError(f"low {self.low:g} is not below high {self.high:g}")


class AttentionWorth(Record, frozen=True):
    """What attention saves over blocks that never fire: where the gates run it; on as many tokens
    chosen by chance; on all of them."""

    fire: typed.Share
    gate: Saving
    chance: Saving
    everywhere: Saving


class Findings(typed.File, frozen=True):
    """What the newest model of a run shows on held-out text."""

    step: Steps
    model: dict[str, Any]  # its config
    parameters: Steps
    judged: HeldOutLoss
    unigram: Loss | None  # of guessing by token frequencies; None where they were too many to count
    blocks: Annotated[tuple[Histogram, ...], Meta(max_length=MOST_BLOCKS)]
    texts: tuple[Trace, ...]
    attention: AttentionWorth | None = None  # of a model with gated blocks
