"""How the gates of a trained model fire on a text: what amor/bench/simulate.py imitates.

  python -m benchmarks firing --model RUN --text TEXT.txt

Whether its blocks fire at the same tokens.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from amor.bench.rates import open_gated
from amor.bench.table import BenchmarkTable
from amor.data.loader import Windows
from amor.gates.override import all_aimed
from amor.judge.gates import own_gates
from amor.judge.loop import join_chunks, run_windows
from amor.judge.windows import of_ids
from amor.models.amor import Amor

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
    table = BenchmarkTable("firing", args.quick)
    table.request("firing")
    count = 2 if args.quick else WINDOWS
    repeated = ids * -(-(2 * WINDOW + 1) // len(ids))  # at least two windows
    windows = of_ids(np.array(repeated), WINDOW, count, "the text")
    shape = {"model": model.config.name, "windows": count, "tokens": WINDOW}
    row = table.row("firing on a text", "head", **shape)
    shares = asdict(overlap(model, windows))
    row.numbers |= {f"{name}, aimed at {TARGET_RATE:.0%}": share for name, share in shares.items()}
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
