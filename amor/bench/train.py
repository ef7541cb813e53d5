"""Training speed: tokens/s of the trainer's own step, for every architecture at scale tiny.

  amor bench train --rounds 9

Each gated architecture is also compared with its own backbone.
"""

import argparse
from collections.abc import Callable
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from amor.bench import machine
from amor.bench.table import BenchmarkRow, BenchmarkTable, common, run_rows
from amor.bench.timing import alternate
from amor.data.loader import BatchSource
from amor.models.build import build
from amor.ops.backends import kernels
from amor.presets import CHANGES, NAMES
from amor.records.run import GateLine
from amor.train.distributed import World
from amor.train.optim import adamw, groups
from amor.train.recipe import Recipe, load
from amor.train.step import Stepper, StepResult

TRAINED = (*NAMES, "amor-mamba2-once", "amor-mamba2-gain")
# torch's FLOP counter sees only torch's own products, so while counting torch does them all
COUNTABLE = "head=chunked,linear=reference"


class RandomBatches(BatchSource):
    """Batches of random tokens in memory, a function of the step alone; stands in for the data of a
    run."""

    def __init__(self, recipe: Recipe):
        self.vocab, self.shape = recipe.config().vocab, (recipe.batch, recipe.context + 1)

    def rows(self, step: int, first: int = 0, last: int | None = None) -> tuple[Tensor, Tensor]:
        """Rows first .. last - 1 of a step's batch: tokens and targets, [last - first, context]
        each."""
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, self.vocab, self.shape, generator=generator)[first:last]
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def stepper(recipe: Recipe) -> Callable[[], StepResult]:
    """A function that takes the next training step of a recipe, as the trainer does.

    The first step has been taken already: it initialises the gates' statistics.
    """
    model = build(recipe.config(), recipe.seed)
    optimizer = adamw(groups(model, recipe.optimiser, recipe.lr), recipe.optimiser)
    world = World(torch.device("cpu"))
    step, number = Stepper(model, optimizer, recipe, RandomBatches(recipe), world), count()
    step(next(number))
    return lambda: step(next(number))


def count_flops(step: Callable[[], StepResult]) -> tuple[int, tuple[GateLine, ...]]:
    """FLOPs of the matrix products of one more step, and the statistics of its gates."""
    with kernels(COUNTABLE), FlopCounterMode(display=False) as counter:
        blocks = step().blocks
    return counter.get_total_flops(), blocks


def backbone_of(name: str) -> str:
    """The architecture without gated blocks that an `amor-` name is built on."""
    base, _, change = name.rpartition("-")
    return (base if change in CHANGES else name).removeprefix("amor-")


def throughput(table: BenchmarkTable, rounds: int, **shape: int) -> BenchmarkRow:
    """Time a step of the tiny recipes. shape: batch, micro_batch and context, where not the
    recipes' own.

    FLOPs are those of matrix products, without attention and recurrences.
    """
    recipes = {name: load(f"tiny/{name}", (), **shape) for name in TRAINED}
    one = recipes["mamba2"]
    sizes = {"batch": one.batch, "micro_batch": one.micro_batch, "context": one.context}
    ops = ("scan", "delta", "conv", "head", "attend")
    row = table.row("trainer's step", *ops, recipes="tiny", **sizes, vocab=one.config().vocab)
    steps = {name: stepper(recipe) for name, recipe in recipes.items()}
    for backbone in dict.fromkeys(map(backbone_of, NAMES)):
        # the sides of a ratio take turns with each other alone, and for longer
        family = {name: step for name, step in steps.items() if backbone_of(name) == backbone}
        row.times |= alternate(family, rounds * len(family))
    flops = {}
    for name, step in steps.items():
        flops[name], blocks = count_flops(step)
        row.numbers[f"GFLOP of products, {name}"] = flops[name] / 1e9
        if blocks:
            row.numbers[f"firing rate, {name}"] = sum(b.fire for b in blocks) / len(blocks)
    for name, seconds in row.seconds.items():
        row.numbers[f"tokens/s, {name}"] = one.step_tokens / seconds
        rate = flops[name] / seconds / 1e9
        row.numbers[f"share of GEMM rate, {name}"] = rate / machine.gemm_rate()
        backbone = backbone_of(name)
        if backbone != name:
            share = flops[backbone] / flops[name]
            row.numbers[f"products of {backbone} over those of {name}"] = share
            row.add_ratio(f"{name} over its backbone", row.times[backbone], row.times[name])
    return row


ROWS = {"throughput": throughput}
QUICK = {"batch": 2, "micro_batch": 2, "context": 16}


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the suite."""
    common(parser, ROWS)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure, print, and return the table for JSON."""
    shape = QUICK if args.quick else {}
    return run_rows("train", args, ROWS, lambda t, n: [ROWS[n](t, args.rounds, **shape)])
