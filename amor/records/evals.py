"""What `amor eval` finds: results in lm-evaluation-harness' own layout, and under one more key,
`amor`, where they come from.

A file holds one suite of one model with its gates run in one way. Tables and figures read
`Evaluation`; the harness's other keys stand beside it for other people's tools.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from amor import typed
from amor.records import Amount, Number, Record, Words

Gates = Literal["model", "closed", "open"]  # as the model has them; none fires; all fire
# windows through the forward; token by token through the engine
Path = Literal["likelihood", "decode"]


class GateCounts(Record, frozen=True):
    """How often gates fired on some tokens. Padding is never counted."""

    tokens: typed.Count
    fires: tuple[typed.Count, ...] = ()  # tokens on which each block fired

    @property
    def rates(self) -> tuple[float, ...]:
        """The fraction of tokens on which each block fired."""
        return tuple(n / max(self.tokens, 1) for n in self.fires)

    def __add__(self, other: "GateCounts") -> "GateCounts":
        """The counts of both; those of no tokens change nothing."""
        if not self.tokens or not other.tokens:
            return self if self.tokens else other
        return GateCounts(
            tokens=self.tokens + other.tokens,
            fires=tuple(a + b for a, b in zip(self.fires, other.fires, strict=True)),
        )


# prefill: context tokens but the last; then what was read by the forward (target) or in steps
# (decode)
Phases = dict[Literal["prefill", "target", "decode"], GateCounts]


class Model(Record, frozen=True):
    """Which model was judged."""

    name: typed.Name
    folder: Words
    fingerprint: typed.Name  # sha256 of config and weights
    parameters: typed.Count
    step: typed.Count | None = None
    tokens: typed.Count | None = None  # trained on; 0: not at all; None: not known


class Data(Record, frozen=True):
    """What one task was read from."""

    source: Words  # a file, or a data set of the hub
    sha256: Words = ""
    rows: typed.Count = 0


class EvalSettings(Record, frozen=True):
    """All that a score depends on besides model, tokenizer and data."""

    gates: Gates = "model"
    path: Path = "likelihood"
    # tokens of a request; more are cut on the left. None: nothing is cut
    max_length: typed.Positive | None = None
    bos: bool = False  # whether the tokenizer's first token stands before each context
    limit: typed.Positive | None = None  # documents of each task
    harness: Words = ""  # version of lm-evaluation-harness


class Timing(Record, frozen=True):
    """How long an evaluation took, and how much of it was computed."""

    seconds: Amount
    computed: typed.Count  # requests
    reused: typed.Count  # found in the store
    tokens: typed.Count  # fed to the model


class LengthCurve(Record, frozen=True):
    """Perplexity of one set of long texts against length: of whole prefixes, and of the last 1,024
    tokens before each length."""

    lengths: tuple[typed.Positive, ...]
    segments: typed.Positive
    prefix: tuple[Number, ...]
    bucket: tuple[Number, ...]
    errors: tuple[Number, ...]  # standard errors of `prefix`, over segments
    # of each bucket, the fraction of tokens that fired, per block
    rates: tuple[tuple[typed.Share, ...], ...] = ()


class About(typed.File, frozen=True):
    """Where the numbers of one file come from."""

    suite: typed.Name
    model: Model
    tokenizer: Words  # its fingerprint
    settings: EvalSettings
    data: dict[str, Data]
    gates: dict[str, Phases]  # by task
    timing: Timing
    # of length-extrapolation, by set
    curves: dict[str, LengthCurve] = msgspec.field(default_factory=dict)
    # mean tokens of prompts, by task, where a length is part of the task
    lengths: dict[str, Amount] = msgspec.field(default_factory=dict)
    # tasks that could not be run, and why
    skipped: dict[str, Words] = msgspec.field(default_factory=dict)


class Evaluation(msgspec.Struct, frozen=True):
    """One file, as far as tables read it: task -> "metric,filter" -> number."""

    amor: About
    results: dict[str, dict[str, Any]]
    n_samples: dict[str, dict[str, Annotated[int, Meta(ge=0)]]] = msgspec.field(
        name="n-samples", default_factory=dict
    )
    versions: dict[str, Any] = msgspec.field(default_factory=dict)

    def score(self, task: str, metric: str) -> tuple[float, float] | None:
        """A number and its standard error (0 where the harness has none), or None where it was
        not measured.

        The harness writes -1 for lengths that were not asked for."""
        value = self.results.get(task, {}).get(f"{metric},none")
        if not isinstance(value, int | float) or value == -1:
            return None
        error = self.results[task].get(f"{metric}_stderr,none")
        return float(value), float(error) if isinstance(error, int | float) else 0.0
