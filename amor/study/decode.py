"""The decode benchmark as a table: our tokens/s, firing rates and crossings beside the paper's."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import msgspec

from amor import typed
from amor.presets import SCALES
from amor.records.bench import DecodeFile
from amor.study.table import Cell, Table, TableRow

PAPER = Path(__file__).with_name("paper.json")


class Throughput(msgspec.Struct, frozen=True):
    """Of one architecture: tokens per second of decode, thousands of training."""

    decode: float = msgspec.field(name="decode_T0_3K")
    train: float = msgspec.field(name="train_ktok_s")


class PaperDecode(msgspec.Struct, frozen=True):
    """What the paper reports of decoding, as far as it is printed."""

    throughput: dict[str, Throughput] = msgspec.field(name="throughput_1.5b")
    fire_rate: dict[str, dict[str, float]] = msgspec.field(
        name="fire_rate_1.5b"
    )  # of an architecture at "T0/3K"
    crossings: dict[str, float] = msgspec.field(
        name="crossings_440m"
    )  # tokens from which it beats another


class PaperFile(msgspec.Struct, frozen=True):
    """paper.json, as far as it is read here."""

    decode: PaperDecode


def paper_decode() -> PaperDecode:
    """The paper's numbers of decoding."""
    return typed.read(PaperFile, PAPER).decode


def tables(file: DecodeFile) -> list[Table]:
    """Of what `amor bench decode --out FILE` wrote. The paper's were measured at 1.5B on an H100:
    other hardware."""
    paper = paper_decode()
    parts = {speeds: file.curves, crossings: file.crossings, firing: file.firing}
    return [make(file, paper) for make, measured in parts.items() if measured]


def speeds(file: DecodeFile, paper: PaperDecode) -> Table:
    """Tokens per second by context, with the paper's at 3K."""
    contexts = sorted({c.context for c in file.curves})
    rows = []
    for label, name in {c.label: c.name for c in file.curves}.items():
        ours = {c.context: c.tokens_per_second for c in file.curves if c.label == label}
        theirs = str(paper.throughput[name].decode) if name in paper.throughput else None
        rows.append(
            TableRow(label, (*(Cell(ours[c]) if c in ours else None for c in contexts), theirs))
        )
    columns = (*(f"{c:,}" for c in contexts), "paper, 1.5b on an H100, 3K")
    return Table(f"Decode at {file.scale}: tokens/s by context", "model", columns, tuple(rows))


def crossings(file: DecodeFile, paper: PaperDecode) -> Table:
    """The context from which a gated model is faster than another."""
    rows = []
    for one in file.crossings:
        same = file.scale == "440m" and one.gated == "amor-mamba2 f=0.4"
        theirs = paper.crossings.get(one.other) if same else None
        numbers = (one.measured, one.equal_bytes, one.our_formula, one.paper_formula, theirs)
        rows.append(TableRow(f"{one.gated} over {one.other}", tuple(map(_tokens, numbers))))
    columns = (
        "measured",
        "equal bytes",
        "our formula",
        "V / (2 (1 - f))",
        "paper, measured at f = 0.4",
    )
    return Table(
        "The context from which a gated model is faster", "faster than", columns, tuple(rows)
    )


def firing(file: DecodeFile, paper: PaperDecode) -> Table:
    """Rates of the model that was measured, and beside them those the paper has of its
    architecture, if any."""
    name = _architecture(file.model, paper.fire_rate)
    rows = []
    for one in file.firing:
        theirs = (
            paper.fire_rate[name].get(f"T{one.temperature:g}/{one.prompt // 1024}K")
            if name
            else None
        )
        cells = (
            Cell(one.rate, digits=3),
            *([None if theirs is None else str(theirs)] if name else []),
        )
        rows.append(TableRow(f"{one.prompt:,}, T = {one.temperature:g}", cells))
    columns = (f"fires, {file.model or 'ours'}", *([f"paper, {name} 1.5b"] if name else []))
    return Table(
        "Firing rates while text is generated", "prompt, temperature", columns, tuple(rows)
    )


def _architecture(model: str | None, known: Collection[str]) -> str | None:
    """The architecture of the paper that a model of this name is, at whatever scale:
    amor-mamba2-440m is amor-mamba2."""
    return next(
        (name for name in known if model in (name, *(f"{name}-{scale}" for scale in SCALES))), None
    )


def _tokens(value: float | None) -> str | None:
    return None if value is None else "from the first" if value == 0 else f"{value / 1024:.0f}K"
