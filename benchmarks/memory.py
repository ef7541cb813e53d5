"""Peak memory: a training step at 180m, the scan, the head's loss and entropy, and decode.

  python -m benchmarks memory --only head

Needs a system that reports the memory of a process (/proc/self/status).
"""

import argparse
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import torch

from amor.bench.chunks import scan_inputs
from amor.bench.decode import OURS, ROOM
from amor.bench.ops import loss_sides
from amor.bench.simulate import ScheduledRounds, build_active, filled_state
from amor.bench.table import BenchmarkRow, BenchmarkTable, common
from amor.bench.train import stepper
from amor.decode.engine import Engine
from amor.errors import AmorError
from amor.models.build import build
from amor.ops import head
from amor.ops.scan import scan
from amor.presets import NAMES
from amor.train.recipe import load
from benchmarks import peak
from benchmarks.sized import SizedRows, run_sized
from benchmarks.steps import parameters


def step_memory(
    table: BenchmarkTable, recipe: str, context: int, names: Sequence[str]
) -> BenchmarkRow:
    """Peak memory of a process that takes two training steps: AdamW's moments exist in the
    second."""
    ops = ("scan", "delta", "conv", "head", "attend")
    vocab = load(recipe).config().vocab
    shape = {"recipe": recipe, "batch": 1, "context": context, "vocab": vocab}
    row = table.row("memory of a step", *ops, **shape)
    for name in names:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as fresh:
            at_peak, standing = fresh.submit(peak_of_step, recipe, name, context).result()
        row.numbers[f"GB of weights, gradients and moments, {name}"] = standing / 1e9
        row.numbers[f"GB at the peak, {name}"] = at_peak / 1e9
    return row


def peak_of_step(recipe: str, name: str, context: int) -> tuple[int, int]:
    """Peak bytes of this process after two steps of one row; and the bytes of weights, gradients
    and two moments in float32."""
    changes = [f"model.name={name}", "precision=float32", "distributed=none"]
    chosen = load(recipe, [*changes, "batch=1", "micro_batch=1"], context=context, steps=2)
    stepper(chosen)()
    return peak.resident("VmHWM"), 4 * 4 * parameters(build(chosen.config(), device="meta"))


def scan_memory(table: BenchmarkTable, width: int, tokens: int) -> BenchmarkRow:
    """Memory of the scan, forward and backward, at three lengths: it should grow linearly."""
    heads = width // 32
    shape = {"tokens": f"{tokens} to {4 * tokens}", "heads": heads}
    row = table.row("memory of the scan, forward and backward", "scan", **shape)
    each = {}
    for length in (tokens, 2 * tokens, 4 * tokens):
        work = scan_forward_backward(length, heads)
        work()  # what is allocated once, such as native code, is not the scan's
        extra = peak.extra_peak(work)
        assert extra is not None
        each[length] = extra / length / heads
        row.numbers[f"extra peak at {length} tokens, MB"] = extra / 2**20
        row.numbers[f"bytes per token and head at {length}"] = each[length]
    growth = each[4 * tokens] / max(each[tokens], 1)
    row.numbers["bytes per token, longest over shortest"] = growth
    return row


def scan_forward_backward(tokens: int, heads: int) -> Callable[[], None]:
    """A function that runs a scan forward and backward and drops the gradients."""
    x, dt, A, B, C = scan_inputs(tokens, heads, 64, 128)
    inputs = x, dt, B, C

    def work() -> None:
        x, dt, B, C = (t.requires_grad_() for t in inputs)
        y, _ = scan(x, dt, A, B, C)
        torch.autograd.grad(y, (x, dt, B, C), torch.ones_like(y))

    return work


def head_memory(table: BenchmarkTable, vocab: int, width: int, tokens: int) -> BenchmarkRow:
    """Memory of the loss with gradients, beside a dense one, and of the entropy of three times as
    many tokens."""
    row = table.row("memory of the head", "head", tokens=tokens, vocab=vocab, width=width)
    x, weight, sides = loss_sides(vocab, width, tokens)
    gradients = (x.nbytes + weight.nbytes) / 2**20
    for name in ("amor", "dense"):
        sides[name]()  # what is allocated once is not the loss's
        x.grad = weight.grad = None
        extra = peak.extra_peak(sides[name])
        assert extra is not None
        row.numbers[f"extra peak of the loss with gradients, MB, {name}"] = extra / 2**20
        row.numbers[f"extra peak of the loss, MB, {name}"] = extra / 2**20 - gradients
    x.grad = weight.grad = None
    with torch.no_grad():
        many = torch.randn(3 * tokens, width)
        head.read(many, weight, entropy=True)
        extra = peak.extra_peak(lambda: head.read(many, weight, entropy=True))
    assert extra is not None
    row.numbers["extra peak of entropy, MB"] = extra / 2**20
    return row


def decode_memory(table: BenchmarkTable, scale: str, context: int) -> BenchmarkRow:
    """Peak memory of decode, beside the declared size of weights and state."""
    row = table.row("memory of decode", scale=scale, context=context)
    model = build_active(OURS, scale)
    engine = Engine(model)
    rounds = ScheduledRounds(engine, filled_state(model, context, ROOM), 0.22)
    rounds.run()
    declared = rounds.engine.nbytes + rounds.base.nbytes
    extra = peak.extra_peak(rounds.run)
    assert extra is not None
    row.numbers["declared, MB"] = declared / 1e6
    row.numbers["beyond it at the peak, MB"] = extra / 1e6
    row.numbers["peak over declared"] = (declared + extra) / declared
    return row


ROWS: SizedRows = {
    "training": (
        step_memory,
        ("paper/180m", 512, NAMES),
        # every architecture needs a process of its own, which takes seconds
        ("tiny/amor-mamba2", 16, ("amor-mamba2",)),
    ),
    "scan": (scan_memory, (768, 2048), (64, 128)),
    "head": (head_memory, (128_256, 768, 1024), (512, 64, 32)),
    "decode": (decode_memory, ("180m", 3072), ("tiny", 64)),
}


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the suite."""
    common(parser, ROWS)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure, print, and return the table for JSON."""
    if not peak.STATUS.exists():
        raise AmorError(f"this system has no {peak.STATUS}, which reports the memory of a process")
    return run_sized("memory", args, ROWS)
