"""The results of `amor bench decode`, and `DecodeFile`: its JSON file as reports read it.

A file holds more than is read back. `ModelTiming`, `CrossingDetails` and `BlockFiringRates` are
written whole; reports read the fields of `DecodePoint`, `Crossing` and `FiringRate`.
"""

from collections.abc import Collection
from typing import Literal

import msgspec

from amor import typed
from amor.presets import NAMES, SCALES, VARIANT_NAMES
from amor.records import Amount, Number, Record, Words
from amor.records.run import Machine


def _check_known(what: str, name: str, choices: Collection[str]) -> None:
    if name not in choices:
        raise ValueError(f"no {what} {name!r}")


class DecodeCost(Record, frozen=True):
    """What one decoded token costs, on average over a round."""

    bytes: Amount  # read
    flops: Amount
    breakdown: dict[str, tuple[Amount, Amount]]  # part of the model -> FLOPs and bytes
    head_passes: Amount  # passes over the head's matrix


class DecodeTiming(DecodeCost, frozen=True):
    """The cost of one token, and its seconds."""

    seconds: Amount  # of the best round
    median: Amount  # of the median round
    rounds: tuple[Amount, ...]
    tokens_per_second: Amount  # of the best round


class RateTiming(DecodeTiming, frozen=True):
    """The same at one context and firing rate."""

    context: typed.Positive  # tokens before the step
    rate: typed.Share


class ModelTiming(RateTiming, frozen=True):
    """The same for one architecture; `DecodePoint` reads it back."""

    label: typed.Name
    name: typed.Name


class DecodePoint(msgspec.Struct, frozen=True):
    """Tokens per second of one architecture at one context.

    label: the architecture's name, and for a gated one " f=RATE".
    """

    label: typed.Name
    context: typed.Positive
    tokens_per_second: Amount
    rate: typed.Share = 0.0

    def __post_init__(self) -> None:
        _check_known("architecture", self.name, NAMES + VARIANT_NAMES)

    @property
    def name(self) -> str:
        """The architecture."""
        return self.label.split(" ")[0]

    @property
    def gated(self) -> bool:
        """Whether the architecture has gates."""
        return " f=" in self.label


class Crossing(msgspec.Struct, frozen=True):
    """The context in tokens from which a gated model is faster than another: measured, and by
    formulas; None where it never is."""

    gated: typed.Name
    other: typed.Name
    measured: Number | None = None
    equal_bytes: Number | None = None
    our_formula: Number | None = None
    paper_formula: Number | None = None


class CrossingDetails(Crossing, frozen=True, kw_only=True):
    """A crossing with the inputs of its formulas and the contexts that were measured."""

    rate: typed.Share
    head_passes: Amount
    head_passes_of_other: Amount
    measured_by_best: Number | None  # from best rounds; `measured` is from the median of pairs
    contexts: tuple[int, ...]


class FiringRate(msgspec.Struct, frozen=True):
    """How often the blocks of a trained model fired while it wrote."""

    prompt: typed.Positive  # tokens
    temperature: Amount
    rate: typed.Share  # mean over blocks


class BlockFiringRates(FiringRate, frozen=True, kw_only=True):
    """The same per block, and whether the text was shorter than the prompt and was repeated."""

    rates: tuple[typed.Share, ...]
    repeated: bool


class SecondsPerToken(Record, frozen=True):
    """Seconds of the best round, per token."""

    seconds: Amount


class DecodeResults(Record, frozen=True, omit_defaults=True):
    """The results of one or more parts of the benchmark; None: not measured."""

    curves: tuple[ModelTiming, ...] | None = None
    crossings: tuple[CrossingDetails, ...] | None = None
    prefill: dict[str, SecondsPerToken] | None = None
    firing_curve: tuple[RateTiming, ...] | None = None


class DecodeFile(typed.File, frozen=True, forbid_unknown_fields=False):
    """What `amor bench decode --out FILE` writes, as far as it is read back."""

    suite: Literal["decode"]
    scale: Words
    machine: Machine
    curves: tuple[DecodePoint, ...] = ()
    crossings: tuple[Crossing, ...] = ()
    firing: tuple[FiringRate, ...] = ()
    model: Words | None = None  # the architecture whose firing was measured

    def __post_init__(self) -> None:
        _check_known("scale", self.scale, SCALES)
