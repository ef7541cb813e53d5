"""How the gates of a trained model fire on a text: what amor/bench/simulate.py imitates.

  python -m benchmarks firing --model RUN --text TEXT.txt

Whether its blocks fire at the same tokens, and how often an 8-bit copy of the head is too inexact
for a gate to decide by.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from amor.bench.rates import open_gated
from amor.bench.table import BenchmarkTable
from amor.data.loader import Windows
from amor.errors import AmorError
from amor.gates.base import Gate
from amor.gates.override import all_aimed
from amor.judge.gates import own_gates
from amor.judge.loop import join_chunks, run_windows
from amor.judge.windows import of_ids
from amor.models.amor import Amor
from amor.ops.head.reference import HeadStats
from amor.ops.product import pack, probe
from amor.ops.product.refine import refine

ROWS = ("firing",)
TARGET_RATE = 0.22  # the paper's firing rate
WINDOWS, WINDOW = 32, 256  # how many windows of the text are read, and their tokens


@dataclass(frozen=True)
class FiringOverlap:
    """Whether blocks fire at the same tokens, as fractions."""

    some: float  # of tokens: at least one block fires
    all: float  # of tokens: every block fires
    followed: float  # of firings: a later block fires at the same token


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the suite."""
    add = parser.add_argument
    add("--model", required=True, metavar="FOLDER", help="a trained model with gates")
    add("--text", required=True, metavar="FILE", help="the text it reads")
    add("--rounds", type=int, default=1, help="not used: nothing is timed")
    add("--quick", action="store_true", help="two windows of the text")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure, print, and return the table for JSON."""
    model, ids = open_gated(args.model, args.text)
    if any(type(gate.decider).decide_interval is Gate.decide_interval for gate in own_gates(model)):
        raise AmorError(f"{args.model}: its gates look at more than the entropy")
    table = BenchmarkTable("firing", args.quick)
    table.request("firing")
    count = 2 if args.quick else WINDOWS
    repeated = ids * -(-(2 * WINDOW + 1) // len(ids))  # at least two windows
    windows = of_ids(np.array(repeated), WINDOW, count, "the text")
    shape = {"model": model.config.name, "windows": count, "tokens": WINDOW}
    row = table.row("firing on a text", "head", "product", **shape)
    shares, doubts = overlap(model, windows), undecided_shares(model, windows)
    row.numbers |= {f"{name}, aimed at {TARGET_RATE:.0%}": v for name, v in asdict(shares).items()}
    for block, (first, refined) in enumerate(doubts):
        row.numbers[f"block {block}, undecided by an 8-bit head"] = first
        row.numbers[f"block {block}, undecided once its likeliest tokens are exact"] = refined
    row.show()
    return table.result()


def overlap(model: Amor, windows: Windows) -> FiringOverlap:
    """Whether blocks fire together, with thresholds that give TARGET_RATE."""
    aimed = all_aimed(own_gates(model), TARGET_RATE)
    fires = join_chunks(run_windows(model, windows, gates=aimed)).fire.flatten(1)
    later = fires.flip(0).cummax(0).values.flip(0)[1:]  # whether some later block fires
    followed = (fires[:-1] & later).sum() / fires[:-1].sum().clamp(min=1)
    some, every = fires.any(0).float().mean(), fires.all(0).float().mean()
    return FiringOverlap(some=float(some), all=float(every), followed=float(followed))


@torch.no_grad()
def undecided_shares(model: Amor, windows: Windows) -> list[tuple[float, float]]:
    """Per block that reads the head: the fraction of tokens its gate cannot decide by an 8-bit
    copy of the head, and by one whose likeliest tokens are exact."""
    exact = pack(model.head_weight)
    copy = pack(model.head_weight, "int8", bounded=True)
    shares = []
    for gate, vectors in zip(own_gates(model), probe_vectors(model, windows), strict=True):
        if not gate.needs:
            continue
        x = vectors[::5]  # every fifth token is sample enough
        first = probe(x, copy, logits=True)
        assert first.logits is not None
        stats = first, refine(x, exact, copy, first.logits)
        before, after = (undecided(gate, each, exact.outputs) for each in stats)
        # likeliest tokens are computed exactly only where the copy did not decide
        still = [a and b for a, b in zip(before, after, strict=True)]
        shares.append((sum(before) / len(x), sum(still) / len(x)))
    return shares


def probe_vectors(model: Amor, windows: Windows) -> list[Tensor]:
    """Per block the vectors [tokens, D] for which it reads the head."""
    kept: list[list[Tensor]] = [[] for _ in model.each_block()]

    def keep(mine: list[Tensor], block: nn.Module, args: tuple[Tensor, ...]) -> None:
        mine.append(model.probe_vector(*args[:2]).flatten(0, 1))  # of the residual and the block's input

    pairs = zip(model.blocks, kept, strict=True)
    hooks = [block.register_forward_pre_hook(partial(keep, mine)) for block, mine in pairs]
    for _ in run_windows(model, windows):
        pass
    for hook in hooks:
        hook.remove()
    return [torch.cat(mine) for mine in kept]


def undecided(gate: Gate, stats: HeadStats, vocab: int) -> list[bool]:
    """[R] whether a gate decides differently at the two ends of the interval the entropy is in."""
    assert stats.entropy is not None and stats.bound is not None
    entropy, off = stats.entropy / math.log(vocab), stats.bound / math.log(vocab)
    fires = gate.decide_interval(
        (entropy - off).tolist(), (entropy + off).tolist(), [0] * len(entropy)
    )
    assert fires is not None
    return [fire is None for fire in fires]
