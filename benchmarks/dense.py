"""Attention of only the queries that fired, beside dense attention, at several firing rates.

  python -m benchmarks dense

DENSE_ABOVE in amor/models/block.py is the firing rate at which the two cross here.
"""

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from amor.bench.table import BenchmarkRow, BenchmarkTable, common, run_rows
from amor.bench.timing import alternate
from amor.ops import attend

WAYS: dict[str, Callable[[Tensor], Any]] = {
    "forward": Tensor.detach,
    "forward and backward": lambda out: out.sum().backward(),
}
ROWS = tuple(WAYS)
SIZE = 64  # of a head


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the suite."""
    common(parser, ROWS)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure, print, and return the table for JSON."""
    shape = (192, 1) if args.quick else (3072, 12)
    return run_rows("dense", args, ROWS, lambda t, n: [measure(t, args.rounds, *shape, WAYS[n])])


def measure(
    table: BenchmarkTable, rounds: int, length: int, heads: int, work: Callable[[Tensor], Any]
) -> BenchmarkRow:
    """All queries by dense causal attention, then a random share of them. work: what is done with
    the output."""
    q, k, v = (torch.randn(1, heads, length, SIZE, requires_grad=True) for _ in range(3))
    row = table.row("fired queries against dense", "attend", keys=length, heads=heads)
    sides: dict[str, Callable[[], Any]] = {
        "dense": lambda: work(attend.dense(q, k, v, causal=True))
    }
    for rate in (0.1, 0.22, 0.4, 0.6, 0.8, 1.0):
        at = torch.sort(torch.randperm(length)[: int(rate * length)]).values
        some = q.detach()[0, :, at].transpose(0, 1).requires_grad_()
        rows = torch.zeros(len(at), dtype=torch.long)
        fired = partial(attend.fired, some, k, v, rows, at + 1)
        sides[f"fired {rate}"] = lambda fired=fired: work(fired())  # type: ignore[misc]
    row.times |= alternate(sides, rounds)
    return row
