"""Layers and models beside transformers', in one process and in turn.

  python -m benchmarks peers --only decode

Needs the extra `peers` (transformers). A full run takes some minutes on two cores and needs a quiet
machine.
"""

import argparse
from collections.abc import Callable
from typing import Any

import torch

from amor.bench.table import BenchmarkRow, BenchmarkTable, common, matching
from amor.convert.peer import library
from benchmarks import generation, layers, steps

# name -> (function, arguments of the full run, arguments of the quick run)
ROWS: dict[str, tuple[Callable[..., BenchmarkRow], tuple[Any, ...], tuple[Any, ...]]] = {
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
    table = BenchmarkTable.from_arguments("peers", args)
    for name in matching(ROWS, args.only):
        table.request(name)
        measure, full, quick = ROWS[name]
        torch.manual_seed(0)
        measure(table, args.rounds, *(quick if args.quick else full)).show()
    return table.result()
