"""Layers and models beside transformers, in one process, in turn.

Needs the extra `peers` (transformers). A full run takes some minutes on two cores and wants a quiet machine.
"""

import argparse
from collections.abc import Callable
from typing import Any

import torch

from amor.bench import generation, heads, layers, steps, transformers
from amor.bench.table import Row, Table, common, named

# name -> (measure, arguments of the full run, arguments of the quick run)
ROWS: dict[str, tuple[Callable[..., Row], tuple[Any, ...], tuple[Any, ...]]] = {
    "mamba2-layer": (layers.mamba2, (768, 1024), (64, 32)),
    "delta-layer": (layers.delta, (768, 1024), (256, 32)),
    "training": (steps.training, tuple(steps.FULL.values()), tuple(steps.QUICK.values())),
    "decode": (generation.decode, (768, 12, 128_256), (64, 2, 512)),
    "prefill": (generation.prefill, (768, 12, 128_256, 512), (64, 2, 512, 16)),
    "loss": (heads.loss, (128_256, 768, 1024), (512, 64, 32)),
    "entropy": (heads.entropy, (128_256, 768, 3072), (512, 64, 32)),
    "scan-memory": (layers.scan_memory, (768, 2048), (64, 128)),
}


def arguments(parser: argparse.ArgumentParser) -> None:
    common(parser, ROWS)


def run(args: argparse.Namespace) -> dict[str, Any]:
    transformers.library()
    table = Table.of("peers", args)
    for name in named(ROWS, args.only):
        table.ask(name)
        measure, full, quick = ROWS[name]
        torch.manual_seed(0)
        measure(table, args.rounds, *(quick if args.quick else full)).show()
    return table.result()
