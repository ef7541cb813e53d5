"""Bars: limits that numbers of a benchmark have to meet, read from a file of yours and judged after the run.

  bars = [
    {suite = "train", row = "throughput", name = "amor-mamba2 over its backbone", at_least = 0.75},
    {suite = "decode", row = "memory", name = "peak over declared", at_most = 1.1, scale = "440m"},
  ]

A number is named as the benchmark prints it, its row as it is asked for (--only, --parts). A ratio of two sides is judged by the
median of its rounds (amor/bench/ratio.py). Without a scale a bar holds for every scale.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

from amor import typed
from amor.bench.ratio import Ratio
from amor.bench.table import LAPS
from amor.errors import AmorError, nearest
from amor.presets import SCALES

LIMITS = ("at_least", "at_most")
MET, MISSED, NOT_JUDGED, NOT_MEASURED = "met", "MISSED", "not judged", "not measured"


Limit = Annotated[float, Meta(ge=-1e300, le=1e300)]


@dataclass(frozen=True)
class _Entry:
    suite: str
    row: str
    name: str
    at_least: Limit | None = None
    at_most: Limit | None = None
    scale: str | None = None


@dataclass(frozen=True)
class _File:
    bars: tuple[_Entry, ...]


@dataclass(frozen=True)
class Bar:
    suite: str
    row: str
    name: str
    kind: str  # one of LIMITS
    limit: float
    scale: str | None = None

    def asked(self, found: Mapping[str, Any]) -> bool:
        """Whether a run was asked to measure what this is about."""
        same_scale = self.scale is None or found.get("scale", self.scale) == self.scale
        return found["suite"] == self.suite and self.row in found["asked"] and same_scale


@dataclass(frozen=True)
class Judged:
    """A bar and what was reached; `words` is the number as it is printed."""

    bar: Bar
    verdict: str
    value: float | None = None
    words: str = "-"
    ratio: Mapping[str, float] | None = None

    def __str__(self) -> str:
        sign = "≥" if self.bar.kind == "at_least" else "≤"
        return f"{self.bar.row}, {self.bar.name}: {self.words} ({sign} {self.bar.limit:g}: {self.verdict})"

    def json(self) -> dict[str, Any]:
        names = {"row": self.bar.row, "name": self.bar.name, "scale": self.bar.scale, self.bar.kind: self.bar.limit}
        return names | {"verdict": self.verdict, "value": self.value, "ratio": self.ratio}


def load(file: str | Path, rows: Mapping[str, Collection[str]]) -> list[Bar]:
    """The bars of a file. rows: for each suite those it has."""
    held = typed.convert(_File, typed.toml_tree(typed.read_text(Path(file)), f"--bars {file}"), f"--bars {file}")
    return [_bar(entry, f"--bars {file}: bars[{number}]", rows) for number, entry in enumerate(held.bars)]


def _bar(entry: _Entry, where: str, rows: Mapping[str, Collection[str]]) -> Bar:
    for key, choices in (("suite", rows), ("row", rows.get(entry.suite, ())), ("scale", SCALES)):
        given = getattr(entry, key)
        if given is not None and given not in choices:
            raise AmorError(f"{where}: no {key} {given!r}; {nearest(given, choices)}")
    if entry.name.endswith(LAPS):
        raise AmorError(f"{where}: {entry.name!r} is a diagnostic and not judged; name {entry.name.removesuffix(LAPS)!r}")
    limits = {key: limit for key in LIMITS if (limit := getattr(entry, key)) is not None}
    if len(limits) != 1:
        given = "both at_least and at_most" if limits else "neither at_least nor at_most"
        raise AmorError(f"{where} ({entry.name}) has {given}; write one of them")
    ((kind, limit),) = limits.items()
    return Bar(entry.suite, entry.row, entry.name, kind, limit, entry.scale)


def judge(found: Mapping[str, Any], bars: list[Bar]) -> list[Judged]:
    """Every bar about what the run was asked for: once for each row that holds its number."""
    return [one for bar in bars if bar.asked(found) for one in _judged(bar, found)]


def _judged(bar: Bar, found: Mapping[str, Any]) -> Iterator[Judged]:
    wall = not found["quick"] and found["clock"] == "wall"
    rows = [r for r in found["rows"] if r["name"] == bar.row and bar.scale in (None, r["shape"].get("scale"))]
    measured = False
    for row in rows:
        if bar.name in row["ratios"]:
            ratio = row["ratios"][bar.name]
            number = Judged(bar, _holds(bar, ratio["median"]), ratio["median"], Ratio(**ratio).words(), ratio)
        elif bar.name in row["found"]:
            value = row["found"][bar.name]
            number = Judged(bar, _holds(bar, value), value, f"{value:.4g}")
        elif bar.name in row["beyond"]:
            value = row["beyond"][bar.name]
            # larger than it: where that does not decide nothing is judged
            decides = value >= bar.limit
            number = Judged(bar, _holds(bar, math.inf) if decides else NOT_JUDGED, None, f"beyond {value:g}")
        else:
            continue
        measured = True
        yield number if wall else Judged(bar, NOT_JUDGED, number.value, number.words, number.ratio)
    if not measured:
        yield Judged(bar, NOT_MEASURED)


def _holds(bar: Bar, value: float) -> str:
    return MET if (value >= bar.limit if bar.kind == "at_least" else value <= bar.limit) else MISSED


def show(judged: list[Judged]) -> None:
    print("\nbars")
    for one in judged:
        print(f"  {one}")
    counts = {verdict: sum(one.verdict == verdict for one in judged) for verdict in (MET, MISSED, NOT_JUDGED, NOT_MEASURED)}
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.items()))


def as_json(judged: list[Judged]) -> dict[str, Any]:
    missed = [str(one) for one in judged if one.verdict == MISSED]
    return {"bars": [one.json() for one in judged], "missed": missed, "ok": not missed}
