"""The results of a benchmark, row by row: shapes, backends, the seconds of every round, and named
numbers."""

import argparse
import math
import subprocess
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace
from rich.console import Console
from rich.table import Table

from amor import typed
from amor.bench import machine
from amor.bench.ratio import PairedRatio, paired
from amor.bench.timing import Timings, clock_name, use_cpu_time
from amor.errors import AmorError, nearest
from amor.ops.backends import BACKENDS, choice

WIDTH = 150  # columns of a printed table: a file or a pipe has no width of its own


@dataclass
class BenchmarkRow:
    """One measurement: sides that were timed, and numbers computed from them.

    Numbers keep their names from commit to commit, so that results can be compared and goals can
    name them.
    """

    name: str  # the row of the suite that this measurement belongs to
    what: str  # what was measured, for the title
    shape: Mapping[str, Any]
    backends: Mapping[str, str]  # operator -> backend that ran
    times: dict[str, Timings] = field(default_factory=dict)  # side -> seconds
    columns: dict[str, dict[str, float]] = field(default_factory=dict)  # side -> its other numbers
    numbers: dict[str, float] = field(default_factory=dict)
    ratios: dict[str, PairedRatio] = field(default_factory=dict)
    lower_bounds: dict[str, float] = field(default_factory=dict)  # of numbers too large to measure

    @property
    def seconds(self) -> dict[str, float]:
        """Side -> seconds of its best round."""
        return {name: times.best for name, times in self.times.items()}

    def add_ratio(self, name: str, top: Timings, bottom: Timings, factor: float = 1.0) -> None:
        """Add the seconds of one side over those of another that took turns with it."""
        self.ratios[name] = paired(top, bottom, factor)

    def show(self) -> None:
        """Print the row: a table of its sides, then its numbers."""
        shape = ", ".join(f"{key}={value}" for key, value in self.shape.items())
        print(f"\n{self.name}: {self.what}  [{shape}]")
        headings = list(dict.fromkeys(key for each in self.columns.values() for key in each))
        cells = {}
        for side, times in self.times.items():
            others = self.columns.get(side, {})
            texts = [f"{others[key]:.4g}" if key in others else "" for key in headings]
            cells[side] = [f"{times.best * 1e3:.2f}", f"{times.median * 1e3:.2f}", *texts]
        print_table(["best ms", "median ms", *headings], cells)
        numbers = {
            k: f"{v:,}" if isinstance(v, int) else f"{v:.4g}" for k, v in self.numbers.items()
        }
        bounds = {name: f"> {value:g}" for name, value in self.lower_bounds.items()}
        texts_of = numbers | bounds | {name: str(ratio) for name, ratio in self.ratios.items()}
        print_table([""], {name: [text] for name, text in texts_of.items()})


def print_table(headings: list[str], rows: Mapping[str, list[str]]) -> None:
    """Print labelled rows under headings, numbers aligned to the right; nothing where there are
    none."""
    if not rows:
        return
    table = Table("", box=None, show_header=any(headings), padding=(0, 2, 0, 0))
    for heading in headings:
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for label, cells in rows.items():
        table.add_row(label, *cells)
    Console(highlight=False, markup=False, width=WIDTH).print(table)


def common(parser: argparse.ArgumentParser, rows: Iterable[str]) -> None:
    """Add the options that most suites take."""
    add = parser.add_argument
    add("--quick", action="store_true", help="small shapes, only to see that everything runs")
    add("--rounds", type=int, default=5, help="rounds per side, in turn (default 5)")
    add("--only", default="", help=f"rows whose name contains this word: {', '.join(rows)}")
    add(
        "--cpu-time",
        action="store_true",
        help="one thread and its own CPU seconds, for a machine that is used by others too",
    )


def matching(rows: Iterable[str], only: str) -> list[str]:
    """The rows whose name contains a word; an error where there is none."""
    names = [name for name in rows if only in name]
    if not names:
        raise AmorError(f"--only {only}: no row has this in its name; {nearest(only, rows)}")
    return names


def numbers(option: str, text: str, kind: type) -> list[Any]:
    """The numbers of an option, written with commas. kind: int, at least 1; float, 0 to 1."""
    least, most = (1, math.inf) if kind is int else (0, 1)
    try:
        values = [kind(word) for word in text.split(",")]
    except ValueError:
        values = []
    if not values or not all(least <= value <= most for value in values):
        whole = "whole numbers of at least 1, with commas, e.g. 1,8,32"
        right = whole if kind is int else "rates between 0 and 1, with commas, e.g. 0.22,0.4"
        raise AmorError(f"{option} {text}: give {right}")
    return values


class BenchmarkTable:
    """The rows of a suite. quick: the shapes were small and the numbers mean nothing."""

    def __init__(self, suite: str, quick: bool):
        self.suite, self.quick = suite, quick
        self.requested: list[str] = []
        self.rows: list[BenchmarkRow] = []

    def request(self, name: str) -> None:
        """Begin a row of the suite: measurements that follow carry its name."""
        self.requested.append(name)

    def row(self, what: str, *ops: str, **shape: Any) -> BenchmarkRow:
        """A new measurement. ops: the operators it runs, whose backends are recorded."""
        name = self.requested[-1] if self.requested else what
        new = BenchmarkRow(name, what, shape, {op: choice(op, "cpu")[0] for op in ops})
        self.rows.append(new)
        return new

    def result(self) -> dict[str, Any]:
        """The table for JSON, with the machine, its measured ceilings and the commit."""
        ceilings = {"gemm_gflops": machine.gemm_rate(), "read_gbs": machine.bandwidth()}
        return {
            "suite": self.suite,
            "quick": self.quick,
            "clock": clock_name(),
            "commit": commit(),
            "machine": typed.tree(replace(machine.describe(), **ceilings)),
            "kernels": {op: choice(op, "cpu")[0] for op in BACKENDS},
            "requested": self.requested,
            "rows": [asdict(row) for row in self.rows],
        }


def run_rows(
    suite: str,
    args: argparse.Namespace,
    rows: Iterable[str],
    measure: Callable[[BenchmarkTable, str], Iterable[BenchmarkRow]],
) -> dict[str, Any]:
    """Measure and print the rows that the options of `common` select; the table for JSON."""
    if args.cpu_time:
        use_cpu_time()
    table = BenchmarkTable(suite, args.quick)
    for name in matching(rows, args.only):
        table.request(name)
        torch.manual_seed(0)
        for row in measure(table, name):
            row.show()
    return table.result()


def commit() -> str | None:
    """The commit of the source tree, None where it is not a git tree."""
    here = str(Path(__file__).parent)
    command = ["git", "-C", here, "describe", "--always", "--dirty", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:  # no git
        return None
    return done.stdout.strip() or None
