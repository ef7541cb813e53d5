"""Decode steps of several rows at once and prefill, for every weight format.

  amor bench batch --models mamba2 --weights float32,int4 --batches 1,8

Models have 12 layers of width 768 and a vocabulary of 128,256: `mamba2` without MLPs, and `llama`,
the preset transformer. A round of decode is some steps of all rows after a prompt of 16 tokens,
with random tokens and the logits of every row; a round of prefill is one prompt and the logits of
its last token. Prefill uses float32 weights whatever the format.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from amor.bench.table import BenchmarkRow, BenchmarkTable, numbers
from amor.bench.timing import Timings, alternate
from amor.decode.engine import Engine
from amor.errors import AmorError, nearest
from amor.models.amor import Amor
from amor.models.build import build
from amor.ops.product import FORMATS
from amor.presets import preset

PROMPT = 16  # tokens before the first decode step
STEPS = {1: 32, 8: 16, 32: 8}  # rows -> decode steps per round; 8 for other numbers of rows
ROWS = ("decode", "prefill")


@dataclass(frozen=True)
class BatchCase:
    """One thing to time: a model in a weight format, and what it does in a round."""

    model: str
    weights: str
    mode: str  # decode:ROWS:STEPS or prefill:TOKENS
    tokens: int  # processed per round
    work: Callable[[], Any]  # runs one round

    @property
    def row(self) -> str:
        """The row of the suite it belongs to."""
        return self.mode.split(":")[0]


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the suite."""
    add = parser.add_argument
    add("--models", default="mamba2,llama", help="with commas (default mamba2,llama)")
    every = ",".join(FORMATS)
    add("--weights", default=every, help=f"formats, with commas (default {every})")
    add("--batches", default="1,8,32", help="rows decoded together, with commas (default 1,8,32)")
    add("--prefill", default="512", help="prompt lengths, with commas; empty: none (default 512)")
    add("--rounds", type=int, default=5, help="rounds per measurement (default 5)")
    add("--quick", action="store_true", help="small models, only to see that everything runs")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure, print, and return the table for JSON."""
    table = BenchmarkTable("batch", args.quick)
    for case in cases(args):
        add_row(table, case, alternate({"amor": case.work}, args.rounds)).show()
    return table.result()


def cases(args: argparse.Namespace) -> Iterator[BatchCase]:
    """Everything that the options select, models and formats one after another."""
    batches = numbers("--batches", args.batches, int)
    prompts = numbers("--prefill", args.prefill, int) if args.prefill else []
    for name in args.models.split(","):
        model = build_model(name, args.quick)
        for weights in args.weights.split(","):
            engine = Engine(model, weights=weights)
            for rows in batches:
                steps = STEPS.get(rows, 8)
                work: Callable[[], Any] = decode_round(engine, rows, steps)
                yield BatchCase(name, weights, f"decode:{rows}:{steps}", rows * steps, work)
            for tokens in prompts:
                prompt = torch.randint(0, model.config.vocab, (tokens,)).tolist()
                work = partial(engine.prefill, [prompt])
                yield BatchCase(name, weights, f"prefill:{tokens}", tokens, work)


def build_model(name: str, quick: bool) -> Amor:
    """One of the suite's models, with fresh weights."""
    layers = 2 if quick else 12
    shapes: dict[str, tuple[str, dict[str, Any]]] = {
        "mamba2": ("mamba2", {"d_ff": 0, "pattern": {"mamba2": layers}}),
        "llama": ("transformer", {"pattern": {"attention": layers}}),
    }
    if name not in shapes:
        raise AmorError(f"--models: no {name!r}; {nearest(name, shapes)}")
    base, changes = shapes[name]
    return build(preset(base, "tiny" if quick else "180m", **changes)).eval()


def decode_round(engine: Engine, rows: int, steps: int) -> Callable[[], None]:
    """A function that runs some decode steps from a fork of one state, so that every round begins
    at the same context."""
    session = engine.prefill([[1] * PROMPT] * rows, room=steps)
    tokens = torch.randint(0, engine.model.config.vocab, (steps, rows))

    def run() -> None:
        fork = session.fork()
        for column in tokens:
            fork.step(column)

    return run


def add_row(table: BenchmarkTable, case: BatchCase, times: dict[str, Timings]) -> BenchmarkRow:
    """The row of one case."""
    if case.row not in table.requested[-1:]:
        table.request(case.row)
    shape = {"model": case.model, "weights": case.weights, "mode": case.mode}
    row = table.row(case.row, "product", **shape)
    row.times |= times
    label = f"{case.model} {case.weights} {case.mode}"
    row.numbers[f"tokens/s, {label}"] = case.tokens / row.seconds["amor"]
    return row
