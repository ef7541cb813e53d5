"""What a run directory holds beside its model: what was measured, what happened, and the machine it
ran on."""

import statistics
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from amor import typed
from amor.records import MOST_BLOCKS, Amount, Number, Perplexity, Record, Steps, Words

Blocks = Annotated[tuple["GateLine", ...], Meta(max_length=MOST_BLOCKS)]


class GateLine(Record, frozen=True, omit_defaults=True):
    """One block in one step: the share of tokens that fired, what decided, and where 10 % and 90 %
    of the scores lie."""

    fire: typed.Share
    mu: Number | None = None
    sigma: Number | None = None
    tau: Number | None = None
    alpha: Number | None = None
    score_10: Number | None = None
    score_90: Number | None = None


class StepTiming(Record, frozen=True):
    """When a step was taken, and how long it took."""

    seconds: Amount
    tokens_per_second: Amount
    time: Amount = 0.0  # when, in seconds since 1970


class Step(typed.File, frozen=True, omit_defaults=True):
    """A line of metrics.jsonl: one optimiser step."""

    step: Steps
    loss: Number | None
    lr: Amount
    grad_norm: Number | None
    tokens: Steps
    timing: StepTiming
    spike: Words | None = None  # what was done about it: "taken" or "skipped"
    blocks: Blocks = ()


class Answered(Record, frozen=True, omit_defaults=True):
    """The questions of a generated task: the share of right tokens, and of tokens that fired, a
    block."""

    accuracy: typed.Share
    tokens: Steps  # of answers
    fire: tuple[typed.Share, ...] = ()


class Valid(Record, frozen=True, omit_defaults=True):
    """What an evaluation found; None where the loss is not finite."""

    nll: Number | None
    perplexity: Perplexity | None
    tokens: Steps
    fire: tuple[typed.Share, ...] = ()
    answered: Answered | None = None


class Judged(Valid, frozen=True, kw_only=True, omit_defaults=True):
    """The same with the step it was made at."""

    step: Steps


class EvalTiming(Record, frozen=True):
    """How long an evaluation took."""

    seconds: Amount


class Evaluated(typed.File, frozen=True, omit_defaults=True):
    """A line of metrics.jsonl: one evaluation."""

    step: Steps
    valid: Valid
    timing: EvalTiming


Line = Step | Evaluated


def kind_of_line(tree: Any) -> type[Line]:
    """The type of a line of metrics.jsonl."""
    return Evaluated if isinstance(tree, dict) and "valid" in tree else Step


class Event(typed.File, frozen=True, omit_defaults=True):
    """A line of events.jsonl: something out of the ordinary."""

    event: typed.Name
    message: Words = ""
    time: Words = ""
    step: Steps | None = None
    key: Words | None = None  # of the recipe, where one was changed
    was: Any = None
    now: Any = None


class Machine(typed.File, frozen=True, omit_defaults=True):
    """What a run or a benchmark ran on; None where nobody looked."""

    cpu: Words | None = None
    cores: Steps | None = None
    threads: Steps | None = None
    waiting: Words | None = None  # how threads wait for each other
    memory_gb: Amount | None = None
    system: Words | None = None
    python: Words | None = None
    torch: Words | None = None
    simd: Words | None = None
    amor: Words | None = None
    gpus: tuple[Words, ...] | None = None
    gemm_gflops: Amount | None = None  # GFLOP/s of a float32 product
    read_gbs: Amount | None = None  # GB/s read from memory
    flops_per_token: Amount | None = None  # of the model that is trained


class Architecture(msgspec.Struct, frozen=True):
    """The model of a recipe: a preset, and what of it was changed; or one that was there
    already."""

    name: typed.Name
    scale: str = "tiny"
    start: str = ""  # a model folder
    changes: dict[str, Any] = {}


class RecipeSummary(msgspec.Struct, frozen=True):
    """The part of a recipe that studies read; `amor.train.recipe` has the whole."""

    name: typed.Name
    model: Architecture
    steps: Steps = 0


# The paper's table of gates averages 20 logs over about 10,000 steps of a trained model. Here every
# step is logged: the last
# tenth of the run is averaged, but no fewer steps than those logs and no more than they span.
TENTH, FEWEST, MOST = 10, 20, 10_000


def settled(steps: Sequence[Step]) -> Sequence[Step]:
    """The last steps of a run, whose gates are averaged."""
    return steps[-min(max(len(steps) // TENTH, FEWEST), MOST) :]


class BlockMean(Record, frozen=True):
    """The gate of one block, as means over steps; None where it has no such number."""

    fire: typed.Share  # share of tokens
    mu: Number | None  # EMA of the median score
    sigma: Number | None  # EMA of the scores' spread around it
    tau: Number | None  # threshold
    alpha: Number | None  # mean factor on the block's output


def block_means(steps: Sequence[Step]) -> tuple[BlockMean, ...]:
    """The gates of all blocks over steps."""
    means = []
    for lines in zip(*(step.blocks for step in steps)):
        each: dict[str, Any] = {}
        for key in BlockMean.__struct_fields__:
            known = [value for line in lines if (value := getattr(line, key)) is not None]
            each[key] = statistics.mean(known) if known else None
        means.append(BlockMean(**each))
    return tuple(means)
