"""The decode benchmark as a table: our tokens/s, firing rates and crossings beside the paper's."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import msgspec

from amor import typed
from amor.presets import SCALES
from amor.records.bench import DecodeFile

PAPER = Path(__file__).with_name("paper.json")


class Throughput(msgspec.Struct, frozen=True):
    """Of one architecture: tokens a second of decode, thousands of training."""

    decode: float = msgspec.field(name="decode_T0_3K")
    train: float = msgspec.field(name="train_ktok_s")


class Paper(msgspec.Struct, frozen=True):
    """What the paper says of decoding, as far as it is shown."""

    throughput: dict[str, Throughput] = msgspec.field(name="throughput_1.5b")
    fire_rate: dict[str, dict[str, float]] = msgspec.field(name="fire_rate_1.5b")  # of an architecture at "T0/3K"
    crossings: dict[str, float] = msgspec.field(name="crossings_440m")  # tokens from which it beats another


class PaperFile(msgspec.Struct, frozen=True):
    decode: Paper


def told_by_paper() -> Paper:
    return typed.read(PaperFile, PAPER).decode


def table(found: DecodeFile) -> str:
    """Markdown, from what `amor bench decode --out FILE` wrote. The paper's were measured at 1.5B on an H100: other hardware."""
    paper = told_by_paper()
    lines = [speeds(found, paper)] if found.curves else []
    if found.crossings:
        lines.append(crossings(found, paper))
    if found.firing:
        lines.append(firing(found, paper))
    return "\n\n".join(lines)


def speeds(found: DecodeFile, paper: Paper) -> str:
    contexts = sorted({c.context for c in found.curves})
    rows = [f"| tokens/s at {found.scale} | " + " | ".join(f"{c:,}" for c in contexts) + " | paper, 1.5b on an H100, 3K |"]
    rows.append("|---" * (len(contexts) + 2) + "|")
    for label, name in {c.label: c.name for c in found.curves}.items():
        ours = {c.context: c.tokens_per_second for c in found.curves if c.label == label}
        theirs = paper.throughput[name].decode if name in paper.throughput else "-"
        cells = [f"{ours[c]:.1f}" if c in ours else "-" for c in contexts]
        rows.append(f"| {label} | " + " | ".join(cells) + f" | {theirs} |")
    return "\n".join(rows)


def crossings(found: DecodeFile, paper: Paper) -> str:
    rows = [
        "| faster than | from, measured | equal bytes | our formula | V / (2 (1 - f)) | paper, measured at f = 0.4 |",
        "|---" * 6 + "|",
    ]
    for one in found.crossings:
        same = found.scale == "440m" and one.gated == "amor-mamba2 f=0.4"
        theirs = paper.crossings.get(one.other) if same else None
        cells = [one.measured, one.equal_bytes, one.our_formula, one.paper_formula, theirs]
        rows.append(f"| {one.gated} over {one.other} | " + " | ".join(map(_tokens, cells)) + " |")
    return "\n".join(rows)


def firing(found: DecodeFile, paper: Paper) -> str:
    """Rates of the model that was measured, and beside them those the paper has of its architecture, if any."""
    name = _architecture(found.model, paper.fire_rate)
    rows = [f"| prompt, temperature | fires, {found.model or 'ours'} |" + (f" paper, {name} 1.5b |" if name else "")]
    rows.append("|---|---|" + ("---|" if name else ""))
    for one in found.firing:
        key = f"T{one.temperature:g}/{one.prompt // 1024}K"
        theirs = f" {paper.fire_rate[name].get(key, '-')} |" if name else ""
        rows.append(f"| {one.prompt:,}, T = {one.temperature:g} | {one.rate:.3f} |{theirs}")
    return "\n".join(rows)


def _architecture(model: str | None, known: Collection[str]) -> str | None:
    """The architecture of the paper that a model of this name is, at whatever scale: amor-mamba2-440m is amor-mamba2."""
    return next((name for name in known if model in (name, *(f"{name}-{scale}" for scale in SCALES))), None)


def _tokens(value: float | None) -> str:
    return "-" if value is None else "from the first" if value == 0 else f"{value / 1024:.0f}K"
