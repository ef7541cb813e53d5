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
import tomllib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from amor.bench.ratio import Ratio
from amor.bench.table import LAPS
from amor.errors import AmorError, nearest
from amor.presets import SCALES

NAMES, LIMITS = ("suite", "row", "name"), ("at_least", "at_most")
KEYS = (*NAMES, *LIMITS, "scale")
MET, MISSED, NOT_JUDGED, NOT_MEASURED = "met", "MISSED", "not judged", "not measured"


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
    try:
        given = tomllib.loads(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise AmorError(f"--bars {file} cannot be read: {error}") from None
    wrong = [key for key in given if key != "bars"]
    if wrong:
        raise AmorError(f"--bars {file}: no key {wrong[0]!r}; {nearest(wrong[0], ['bars'])}")
    entries = given.get("bars")
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise AmorError(f'--bars {file}: write bars = [{{suite = "...", row = "...", name = "...", at_least = 1.0}}, ...]')
    return [_bar(entry, f"--bars {file}, bar {number}", rows) for number, entry in enumerate(entries, 1)]


def _bar(entry: dict[str, Any], where: str, rows: Mapping[str, Collection[str]]) -> Bar:
    for key in entry:
        if key not in KEYS:
            raise AmorError(f"{where}: no key {key!r}; {nearest(key, KEYS)}")
    for key in NAMES:
        if key not in entry:
            raise AmorError(f"{where} has no {key}; suite, row, name and a limit are needed")
    for key in entry.keys() - LIMITS:
        if not isinstance(entry[key], str):
            raise AmorError(f"{where}: {key} must be a text, not {entry[key]!r}")
    suite, row, name, scale = entry["suite"], entry["row"], entry["name"], entry.get("scale")
    for key, choices in (("suite", rows), ("row", rows.get(suite, ())), ("scale", SCALES)):
        if key in entry and entry[key] not in choices:
            raise AmorError(f"{where}: no {key} {entry[key]!r}; {nearest(entry[key], choices)}")
    if name.endswith(LAPS):
        raise AmorError(f"{where}: {name!r} is a diagnostic and not judged; name {name.removesuffix(LAPS)!r}")
    limits = [key for key in LIMITS if key in entry]
    if len(limits) != 1:
        given = "both at_least and at_most" if limits else "neither at_least nor at_most"
        raise AmorError(f"{where} ({name}) has {given}; write one of them")
    limit = entry[limits[0]]
    if isinstance(limit, bool) or not isinstance(limit, int | float) or not math.isfinite(limit):
        raise AmorError(f"{where} ({name}): {limits[0]} must be a number, not {limit!r}")
    return Bar(suite, row, name, limits[0], limit, scale)


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
