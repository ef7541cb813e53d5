"""Training: tokens/s of the trainer's own step, every architecture beside transformers' Mamba2, and the memory of a 180m step.

The rows beside transformers need the extra `peers`. A full run takes some minutes on two cores and wants a quiet machine.
"""

import argparse
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import count
from multiprocessing import get_context
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from amor.bench import machine, memory, steps, transformers
from amor.bench.table import Row, Table, common, named
from amor.bench.timing import alternate, watch
from amor.errors import AmorError
from amor.models.build import build
from amor.ops.backends import kernels
from amor.presets import CHANGES, NAMES
from amor.records.run import GateLine
from amor.train.distributed import World
from amor.train.optim import adamw, groups
from amor.train.recipe import Recipe, load
from amor.train.step import Stepper, StepResult

TRAINED = (*NAMES, "amor-mamba2-once", "amor-mamba2-gain")
BY_TORCH = "head=chunked,linear=reference"  # where the native form multiplies matrices unseen by torch


class Drawn:
    """Batches of drawn tokens in memory, a function of the step alone."""

    def __init__(self, recipe: Recipe):
        self.vocab, self.shape = recipe.config().vocab, (recipe.batch, recipe.context + 1)

    def rows(self, step: int, first: int, last: int) -> tuple[Tensor, Tensor]:
        drawn = torch.randint(0, self.vocab, self.shape, generator=torch.Generator().manual_seed(step))[first:last]
        return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


def stepper(recipe: Recipe) -> Callable[[], StepResult]:
    """A call takes the next step of a recipe, as the trainer does. The first has been taken: gates have met their batch."""
    model = build(recipe.config(), recipe.seed)
    watch(model)
    optimizer = adamw(groups(model, recipe.optimiser, recipe.lr), recipe.optimiser)
    step, number = Stepper(model, optimizer, recipe, Drawn(recipe), World(torch.device("cpu"))), count()
    step(next(number))
    return lambda: step(next(number))


def counted(side: Callable[[], StepResult]) -> tuple[int, tuple[GateLine, ...]]:
    """FLOPs of the products of one more step, and what its blocks found. Torch counts its own products, so it does them all."""
    with kernels(BY_TORCH), FlopCounterMode(display=False) as counter:
        blocks = side().blocks
    return counter.get_total_flops(), blocks


def backbone_of(name: str) -> str:
    base, _, change = name.rpartition("-")
    return (base if change in CHANGES else name).removeprefix("amor-")


def throughput(table: Table, rounds: int, **shape: int) -> Row:
    """The step of the tiny recipes; the FLOPs of its products, those of attention and recurrences apart."""
    recipes = {name: load(f"tiny/{name}", (), **shape) for name in TRAINED}
    one = recipes["mamba2"]
    described = {"recipes": "tiny", "batch": one.batch, "micro_batch": one.micro_batch, "context": one.context}
    row = table.row("trainer's step", "scan", "delta", "conv", "head", "attend", **described, vocab=one.config().vocab)
    sides = {name: stepper(recipe) for name, recipe in recipes.items()}
    for backbone in dict.fromkeys(map(backbone_of, NAMES)):  # the two sides of a ratio take turns directly, and longer
        family = {name: side for name, side in sides.items() if backbone_of(name) == backbone}
        row.time(alternate(family, rounds * len(family)))
    flops = {}
    for name, side in sides.items():
        flops[name], blocks = counted(side)
        row.found[f"GFLOP of products, {name}"] = flops[name] / 1e9
        if blocks:
            row.found[f"firing rate, {name}"] = sum(block.fire for block in blocks) / len(blocks)
    for name in TRAINED:
        row.found[f"tokens/s, {name}"] = one.step_tokens / row.seconds[name]
        row.found[f"share of GEMM rate, {name}"] = flops[name] / row.seconds[name] / 1e9 / machine.gemm_rate()
    for name in TRAINED:
        backbone = backbone_of(name)
        if backbone != name:
            row.found[f"products of {backbone} over those of {name}"] = flops[backbone] / flops[name]
            row.ratio(f"{name} over its backbone", row.times[backbone], row.times[name])
    return row


def step_memory(table: Table, rounds: int, recipe: str, context: int, names: Sequence[str]) -> Row:
    """Peak resident memory of a process that takes two steps: in the second AdamW's moments stand from the start."""
    shape = {"recipe": recipe, "batch": 1, "context": context, "vocab": load(recipe).config().vocab}
    row = table.row("memory of a step", "scan", "delta", "conv", "head", "attend", **shape)
    for name in names:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as fresh:
            peak, standing = fresh.submit(peak_of, recipe, name, context).result()
        row.found[f"GB of weights, gradients and moments, {name}"] = standing / 1e9
        row.found[f"GB at the peak, {name}"] = peak / 1e9
    return row


def peak_of(recipe: str, name: str, context: int) -> tuple[int, int]:
    """Bytes this process held at most, after two steps of one row; and those of weights, gradients and two moments."""
    changes = [f"model.name={name}", "precision=float32", "distributed=none", "batch=1", "micro_batch=1"]
    chosen = load(recipe, changes, context=context, steps=2)
    stepper(chosen)()
    return memory.resident("VmHWM"), 4 * 4 * steps.parameters(build(chosen.config(), device="meta"))


def without_status() -> str | None:
    return None if memory.STATUS.exists() else f"this system has no {memory.STATUS}, which tells the peak of a process"


# name -> (measure, arguments of the full run, arguments of the quick run, why it cannot be measured here)
Measure = tuple[Callable[..., Row], dict[str, Any], dict[str, Any], Callable[[], str | None]]
ROWS: dict[str, Measure] = {
    "throughput": (throughput, {}, {"batch": 2, "micro_batch": 2, "context": 16}, lambda: None),
    "peers": (steps.training, steps.FULL, steps.QUICK, transformers.missing),
    "memory": (
        step_memory,
        {"recipe": "paper/180m", "context": 512, "names": NAMES},
        {"recipe": "tiny/amor-mamba2", "context": 16, "names": ("amor-mamba2",)},
        without_status,
    ),
}


def arguments(parser: argparse.ArgumentParser) -> None:
    common(parser, ROWS)


def run(args: argparse.Namespace) -> dict[str, Any]:
    table, left_out = Table.of("train", args), {}
    for name in named(ROWS, args.only):
        table.ask(name)
        measure, full, quick, missing = ROWS[name]
        reason = missing()
        if reason and args.only:
            raise AmorError(f"bench train --only {args.only}: {reason}")
        if reason:
            left_out[name] = reason
            print(f"\n{name}: left out, {reason}")
            continue
        torch.manual_seed(0)
        measure(table, args.rounds, **(quick if args.quick else full)).show()
    return table.result() | {"left_out": left_out}
