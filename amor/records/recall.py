"""RUN/recall.json: how well a model answers the questions of a generated task, and where its gates
fired."""

from typing import Annotated, Any

from msgspec import Meta

from amor import typed
from amor.records import MOST_BLOCKS, Amount, Number, Record, Steps, Words


class Mean(Record, frozen=True):
    """A mean and its standard error over rows; None where it is not finite, or where there is one
    row."""

    mean: Number | None
    se: Amount | None


class Rate(Record, frozen=True):
    """The share of tokens that one block fired on."""

    questions: typed.Share
    elsewhere: typed.Share


class StateSize(Record, frozen=True):
    """Numbers in the state of one row of a batch."""

    fixed: Steps  # recurrent states and windows of convolutions, however much was read
    a_token: Steps  # keys and values, for each token that was read


class Recall(typed.File, frozen=True):
    """Right answers of one model to the questions of one task."""

    model: Words
    task: dict[str, Any]  # its kind and options
    gate: Words | None  # the kind of the gates that decided; None: no blocks
    seed: int
    rows: Steps
    questions: Steps  # per row
    answers: Steps  # tokens of the answers, per row
    chance: typed.Share  # accuracy of guessing among the tokens that are answers
    token: Mean  # accuracy of the best token at every token of an answer
    whole: Mean  # share of the questions of which every token is right
    nll_questions: Mean  # nats per token of an answer
    nll_elsewhere: Mean
    blocks: Annotated[tuple[Rate, ...], Meta(max_length=MOST_BLOCKS)]
    state: StateSize


class RecallByPolicy(typed.File, frozen=True):
    """RUN/recall/by_policy.json: right answers of one model by where its attention runs."""

    rate: typed.Share  # of tokens that fire, mean of blocks
    gate: Mean  # where the gate chose
    chance: Mean  # on as many tokens chosen by chance
    everywhere: Mean
    never: Mean
