"""The paper's results as numbers: its tables (paper_tables.json), and speeds and firing rates of
decode (paper.json). They stand below and beside our rows."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import msgspec

from amor import typed
from amor.records import Number

FOLDER = Path(__file__).parent
SCALE = "1.5B"  # the scale at which the paper has loss, firing rate and speed of every model
# as the paper prints it -> our name
NAMES = {
    "Transformer": "transformer",
    "Mamba2": "mamba2",
    "Gated DeltaNet": "gated-deltanet",
    "Mamba2 Serial Hybrid": "mamba2-serial",
    "Gated DeltaNet Serial Hybrid": "gated-deltanet-serial",
    "Mamba2 Fused Hybrid": "mamba2-fused",
    "AMOR-Mamba2": "amor-mamba2",
    "AMOR-GatedDeltaNet": "amor-gated-deltanet",
    "AMOR (Block 0 pre-norm) Mamba2": "amor-mamba2-prenorm",
    "AMOR (Block 0 pre-norm) Gated DeltaNet": "amor-gated-deltanet-prenorm",
}


class PaperRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One model: one number per column."""

    scale: typed.Name
    model: typed.Name
    values: tuple[Number, ...]


class Printed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One table, as it is printed: accuracies in percent."""

    columns: tuple[typed.Name, ...]
    rows: tuple[PaperRow, ...]


class Tables(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """paper_tables.json."""

    source: typed.Name
    tables: dict[str, Printed]


class Throughput(msgspec.Struct, frozen=True):
    """Of one architecture: tokens per second of decode, thousands of training."""

    decode: float = msgspec.field(name="decode_T0_3K")
    train: float = msgspec.field(name="train_ktok_s")


class PaperDecode(msgspec.Struct, frozen=True):
    """What the paper reports of decoding, as far as it is printed."""

    throughput: dict[str, Throughput] = msgspec.field(name="throughput_1.5b")
    # of an architecture at "T0/3K": temperature and tokens of the prompt
    fire_rate: dict[str, dict[str, float]] = msgspec.field(name="fire_rate_1.5b")
    # tokens from which it beats another
    crossings: dict[str, float] = msgspec.field(name="crossings_440m")


class PaperFile(msgspec.Struct, frozen=True):
    """paper.json, as far as it is read here."""

    decode: PaperDecode


@cache
def tables() -> dict[str, Printed]:
    """The paper's tables by name."""
    return typed.read(Tables, FOLDER / "paper_tables.json").tables


@cache
def paper_decode() -> PaperDecode:
    """The paper's numbers of decoding."""
    return typed.read(PaperFile, FOLDER / "paper.json").decode


def rows(names: tuple[str, ...], scale: str) -> dict[str, dict[str, float]]:
    """Model -> column -> number, of several tables, each model once: ablations print the full model
    again, with "(K=3)" behind its name."""
    found: dict[str, dict[str, float]] = {}
    for table in (tables()[name] for name in names):
        for row in (row for row in table.rows if row.scale == scale):
            values = dict(zip(table.columns, row.values, strict=True))
            found.setdefault(row.model.removesuffix(" (K=3)"), values)
    return found


def reported() -> dict[str, dict[str, float]]:
    """Our name -> perplexity, tokens per second and firing rate in percent (greedy, after 3K
    tokens), as far as the paper reports them at SCALE."""
    decode, found = paper_decode(), {}
    for printed, values in rows(("common_sense", "ablation_common_sense_1p5b"), SCALE).items():
        name = NAMES[printed]
        known = found[name] = {"perplexity": values["fineweb_edu_ppl"]}
        if name in decode.fire_rate:
            known["fires, %"] = 100 * decode.fire_rate[name]["T0/3K"]
        if speed := decode.throughput.get(name):
            known |= {"train tok/s": 1000 * speed.train, "decode tok/s": speed.decode}
    return found
