"""Bars: limits for the numbers of a benchmark, read from a file and compared after the run.

  bars = [
    {suite = "train", row = "throughput", name = "amor-mamba2 over its backbone", at_least = 0.75},
    {suite = "decode", row = "memory", name = "peak over declared", at_most = 1.1, scale = "440m"},
  ]

A number is named as the benchmark prints it, its row as --only and --parts name it. A ratio of two
sides is compared by the median of its rounds (amor/bench/ratio.py). A bar without a scale applies
to every scale.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

from amor import typed
from amor.bench.ratio import PairedRatio
from amor.errors import AmorError, nearest
from amor.presets import SCALES

LIMITS = ("at_least", "at_most")
MET, MISSED, NOT_JUDGED, NOT_MEASURED = "met", "MISSED", "not judged", "not measured"

Limit = Annotated[float, Meta(ge=-1e300, le=1e300)]


@dataclass(frozen=True)
class _BarEntry:
    suite: str
    row: str
    name: str
    at_least: Limit | None = None
    at_most: Limit | None = None
    scale: str | None = None


@dataclass(frozen=True)
class _BarFile:
    bars: tuple[_BarEntry, ...]


@dataclass(frozen=True)
class Bar:
    """A limit for one number."""

    suite: str
    row: str
    name: str
    kind: str  # one of LIMITS
    limit: float
    scale: str | None = None

    def applies(self, result: Mapping[str, Any]) -> bool:
        """Whether a run was meant to measure this number."""
        same_scale = self.scale is None or result.get("scale", self.scale) == self.scale
        return result["suite"] == self.suite and self.row in result["requested"] and same_scale


@dataclass(frozen=True)
class BarResult:
    """A bar and the number it was compared with."""

    bar: Bar
    verdict: str
    value: float | None = None
    text: str = "-"  # the number as it is printed
    ratio: Mapping[str, float] | None = None

    def __str__(self) -> str:
        sign = "≥" if self.bar.kind == "at_least" else "≤"
        limit = f"{sign} {self.bar.limit:g}: {self.verdict}"
        return f"{self.bar.row}, {self.bar.name}: {self.text} ({limit})"

    def json(self) -> dict[str, Any]:
        """For the JSON of the run."""
        bar = self.bar
        names = {"row": bar.row, "name": bar.name, "scale": bar.scale, bar.kind: bar.limit}
        return names | {"verdict": self.verdict, "value": self.value, "ratio": self.ratio}


def load(file: str | Path, rows: Mapping[str, Collection[str]]) -> list[Bar]:
    """The bars of a file. rows: suite -> the rows it has."""
    where = f"--bars {file}"
    entries = typed.convert(
        _BarFile, typed.toml_tree(typed.read_text(Path(file)), where), where
    ).bars
    return [_bar(entry, f"{where}: bars[{i}]", rows) for i, entry in enumerate(entries)]


def _bar(entry: _BarEntry, where: str, rows: Mapping[str, Collection[str]]) -> Bar:
    names = {"suite": rows, "row": rows.get(entry.suite, ()), "scale": SCALES}
    for key, choices in names.items():
        given = getattr(entry, key)
        if given is not None and given not in choices:
            raise AmorError(f"{where}: no {key} {given!r}; {nearest(given, choices)}")
    limits = {key: limit for key in LIMITS if (limit := getattr(entry, key)) is not None}
    if len(limits) != 1:
        given = "both at_least and at_most" if limits else "neither at_least nor at_most"
        raise AmorError(f"{where} ({entry.name}) has {given}; write one of them")
    ((kind, limit),) = limits.items()
    return Bar(entry.suite, entry.row, entry.name, kind, limit, entry.scale)


def compare(result: Mapping[str, Any], bars: list[Bar]) -> list[BarResult]:
    """Every bar that applies to a run: one result per row that has its number.

    Nothing is judged after --quick or --cpu-time, because limits are meant for wall time.
    """
    wall = not result["quick"] and result["clock"] == "wall"
    compared = []
    for bar in bars:
        if not bar.applies(result):
            continue
        rows = [row for row in result["rows"] if _is_about(bar, row)]
        of_bar = [found for row in rows if (found := _compare(bar, row)) is not None]
        if not wall:
            of_bar = [replace(found, verdict=NOT_JUDGED) for found in of_bar]
        compared += of_bar or [BarResult(bar, NOT_MEASURED)]
    return compared


def _is_about(bar: Bar, row: Mapping[str, Any]) -> bool:
    return row["name"] == bar.row and bar.scale in (None, row["shape"].get("scale"))


def _compare(bar: Bar, row: Mapping[str, Any]) -> BarResult | None:
    """The bar compared with its number in a row; None where the row does not have it."""
    if ratio := row["ratios"].get(bar.name):
        median = ratio["median"]
        return BarResult(bar, _verdict(bar, median), median, str(PairedRatio(**ratio)), ratio)
    if bar.name in row["numbers"]:
        value = row["numbers"][bar.name]
        return BarResult(bar, _verdict(bar, value), value, f"{value:.4g}")
    if bar.name in row["lower_bounds"]:
        bound = row["lower_bounds"][bar.name]
        # the number is larger than the bound, which decides only where the bound reaches the limit
        verdict = _verdict(bar, math.inf) if bound >= bar.limit else NOT_JUDGED
        return BarResult(bar, verdict, None, f"beyond {bound:g}")
    return None


def _verdict(bar: Bar, value: float) -> str:
    met = value >= bar.limit if bar.kind == "at_least" else value <= bar.limit
    return MET if met else MISSED


def show(results: list[BarResult]) -> None:
    """Print every bar, then how many were met."""
    print("\nbars")
    for each in results:
        print(f"  {each}")
    verdicts = [each.verdict for each in results]
    kinds = (MET, MISSED, NOT_JUDGED, NOT_MEASURED)
    print(", ".join(f"{verdicts.count(kind)} {kind}" for kind in kinds))


def as_json(results: list[BarResult]) -> dict[str, Any]:
    """For the JSON of the run."""
    missed = [str(each) for each in results if each.verdict == MISSED]
    return {"bars": [each.json() for each in results], "missed": missed, "ok": not missed}
