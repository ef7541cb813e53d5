"""What `amor bench decode` finds, and `Decode`: its file as far as it is shown; other benchmarks and numbers stand beside it.

`Measured`, `Crossed` and `Written` are written whole; of each a report reads the fields of `Curve`, `Crossing` and `Firing`.
"""

from collections.abc import Collection
from typing import Literal

import msgspec

from amor import typed
from amor.presets import NAMES, SCALES, VARIANT_NAMES
from amor.records import Amount, Number, Record, Words
from amor.records.run import Machine


def _known(what: str, name: str, choices: Collection[str]) -> None:
    if name not in choices:
        raise ValueError(f"no {what} {name!r}")


class Spent(Record, frozen=True):
    """What one token spends on average."""

    bytes: Amount
    flops: Amount
    spent: dict[str, tuple[Amount, Amount]]  # on what: FLOPs and bytes
    head_passes: Amount
    cheap_passes: Amount  # over the 8-bit copy of the head


class Timed(Spent, frozen=True):
    """And how long it takes: seconds of the best round, of the median and of each."""

    seconds: Amount
    median: Amount
    rounds: tuple[Amount, ...]
    by_laps: Amount | None
    tokens_per_second: Amount


class AtRate(Timed, frozen=True):
    """The same at a context and a firing rate."""

    context: typed.Positive
    rate: typed.Share


class Measured(AtRate, frozen=True):
    """The same of one architecture; as a `Curve` is read."""

    label: typed.Name
    name: typed.Name


class Curve(msgspec.Struct, frozen=True):
    """Tokens a second of one architecture at one context; `label` is its name and, of a gated one, " f=RATE"."""

    label: typed.Name
    context: typed.Positive
    tokens_per_second: Amount
    rate: typed.Share = 0.0

    def __post_init__(self) -> None:
        _known("architecture", self.name, NAMES + VARIANT_NAMES)

    @property
    def name(self) -> str:
        return self.label.split(" ")[0]

    @property
    def gated(self) -> bool:
        return " f=" in self.label


class Crossing(msgspec.Struct, frozen=True):
    """From how many tokens on one is faster than the other: measured, and by formulas; None where it never is."""

    gated: typed.Name
    other: typed.Name
    measured: Number | None = None
    equal_bytes: Number | None = None
    our_formula: Number | None = None
    paper_formula: Number | None = None


class Crossed(Crossing, frozen=True, kw_only=True):
    """With what the formulas were given, and the contexts that were measured."""

    rate: typed.Share
    head_passes: Amount
    head_passes_of_other: Amount
    measured_by_best: Number | None
    contexts: tuple[int, ...]


class Firing(msgspec.Struct, frozen=True):
    """How often the blocks of a trained model fired while it wrote on."""

    prompt: typed.Positive
    temperature: Amount
    rate: typed.Share


class Written(Firing, frozen=True, kw_only=True):
    """Block by block, and whether the text was too short and had to be repeated."""

    rates: tuple[typed.Share, ...]
    repeated: bool


class Together(Record, frozen=True):
    """Shares of tokens at which some block fires and at which all do, and of firings that another block's follows."""

    some: typed.Share
    all: typed.Share
    followed: typed.Share


class OnText(Record, frozen=True):
    """How a trained model fires on a text, and for each block the share of tokens an 8-bit head leaves in doubt, twice."""

    together: Together
    doubts: tuple[tuple[typed.Share, typed.Share], ...]


class Seconds(Record, frozen=True):
    seconds: Amount


class Memory(Record, frozen=True):
    """Bytes: weights and state as declared, and what the peak lies above them; None where that cannot be measured."""

    declared: int
    extra: int | None


class Found(Record, frozen=True, omit_defaults=True):
    """What one of the benchmark's measurements found."""

    curves: tuple[Measured, ...] | None = None
    crossings: tuple[Crossed, ...] | None = None
    savings: dict[str, Timed | Seconds] | None = None
    prefill: dict[str, Seconds] | None = None
    firing_curve: tuple[AtRate, ...] | None = None
    memory: Memory | None = None


class Decode(typed.File, frozen=True, forbid_unknown_fields=False):
    suite: Literal["decode"]
    scale: Words
    machine: Machine
    curves: tuple[Curve, ...] = ()
    crossings: tuple[Crossing, ...] = ()
    firing: tuple[Firing, ...] = ()
    model: Words | None = None  # the architecture whose firing was measured

    def __post_init__(self) -> None:
        _known("scale", self.scale, SCALES)
