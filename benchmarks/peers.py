"""Layers and models beside transformers', in one process and in turn.

  python -m benchmarks peers --only decode

Needs the extra `peers` (transformers). A full run takes some minutes on two cores and needs a quiet
machine.
"""

import argparse
from typing import Any

from amor.bench.table import common
from amor.convert.peer import library
from benchmarks import generation, layers, steps
from benchmarks.sized import SizedRows, run_sized

ROWS: SizedRows = {
    "mamba2-layer": (layers.mamba2, (768, 1024), (64, 32)),
    "delta-layer": (layers.delta, (768, 1024), (256, 32)),
    # scale, rows and length; 16 x 256 is the batch of the tiny recipes
    "training": (steps.training, ("tiny", 16, 256), ("tiny", 1, 16)),
    "decode": (generation.decode, (768, 12, 128_256), (64, 2, 512)),
    "prefill": (generation.prefill, (768, 12, 128_256, 512), (64, 2, 512, 16)),
}


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the suite."""
    common(parser, ROWS)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure, print, and return the table for JSON."""
    library()
    rounds = args.rounds
    rows = {n: (f, (rounds, *full), (rounds, *quick)) for n, (f, full, quick) in ROWS.items()}
    return run_sized("peers", args, rows)
