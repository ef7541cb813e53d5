"""What `amor bench decode --out FILE` wrote, as far as it is shown: other benchmarks and numbers stand beside it."""

from collections.abc import Collection
from typing import Literal

import msgspec

from amor import typed
from amor.presets import NAMES, SCALES
from amor.records import Amount, Number, Words
from amor.records.run import Machine


def _known(what: str, name: str, choices: Collection[str]) -> None:
    if name not in choices:
        raise ValueError(f"no {what} {name!r}")


class Curve(msgspec.Struct, frozen=True):
    """Tokens a second of one architecture at one context; `label` is its name and, of a gated one, " f=RATE"."""

    label: typed.Name
    context: typed.Positive
    tokens_per_second: Amount
    rate: typed.Share = 0.0

    def __post_init__(self) -> None:
        _known("architecture", self.name, NAMES)

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


class Firing(msgspec.Struct, frozen=True):
    """How often the blocks of a trained model fired while it wrote on."""

    prompt: typed.Positive
    temperature: Amount
    rate: typed.Share


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
