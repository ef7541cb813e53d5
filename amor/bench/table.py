"""What a benchmark found, row by row: shapes, backends, the seconds of every round, and named numbers. Nothing is judged."""

import argparse
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from amor import typed
from amor.bench import machine
from amor.bench.ratio import Ratio, paired
from amor.bench.timing import Times, clock_name, count_cpu_time
from amor.errors import AmorError, nearest
from amor.ops.backends import BACKENDS, choice

LAPS = " by laps"  # ends the name of a ratio of sums of the best laps: lower bounds of seconds, so a diagnostic


@dataclass
class Row:
    """One measurement: a table of sides and the numbers found from them. Numbers keep their names from commit to commit."""

    name: str  # what it is asked for by
    what: str
    shape: Mapping[str, Any]
    backends: Mapping[str, str]
    times: dict[str, Times] = field(default_factory=dict)
    found: dict[str, float] = field(default_factory=dict)
    ratios: dict[str, Ratio] = field(default_factory=dict)
    beyond: dict[str, float] = field(default_factory=dict)  # numbers of which only this is known: they are larger

    @property
    def seconds(self) -> dict[str, float]:
        """Of the best round of each side."""
        return {name: taken.best for name, taken in self.times.items()}

    def time(self, times: Mapping[str, Times]) -> None:
        self.times |= times

    def ratio(self, name: str, numerator: Times, denominator: Times, factor: float = 1.0) -> None:
        """The seconds of one side over those of another that took turns with it."""
        self.ratios[name] = paired(numerator, denominator, factor)
        if numerator.by_laps and denominator.by_laps:
            self.found[name + LAPS] = factor * numerator.by_laps / denominator.by_laps

    def show(self) -> None:
        shape = ", ".join(f"{k}={v}" for k, v in self.shape.items())
        print(f"\n{self.name}: {self.what}  [{shape}]")
        wide = max(map(len, (" " * 34, *self.times, *self.found, *self.ratios)))
        for name, taken in self.times.items():
            print(f"  {name:<{wide}} best {taken.best * 1e3:>9.2f} ms, median {taken.median * 1e3:>9.2f} ms")
        for name, value in self.found.items():
            print(f"  {name:<{wide}} {value:>14,}" if isinstance(value, int) else f"  {name:<{wide}} {value:>14.4g}")
        for name, ratio in self.ratios.items():
            print(f"  {name:<{wide}} {ratio.words()}")


def common(parser: argparse.ArgumentParser, rows: Iterable[str]) -> None:
    """The options every suite takes."""
    parser.add_argument("--quick", action="store_true", help="small shapes, to see that everything runs; no bar is judged")
    parser.add_argument("--rounds", type=int, default=5, help="rounds a side, in turn (default 5)")
    parser.add_argument("--only", default="", help=f"rows whose name holds this word: {', '.join(rows)}")
    words = "one thread, its own CPU seconds: for a machine that others use; no bar is judged"
    parser.add_argument("--cpu-time", action="store_true", help=words)


def named(rows: Iterable[str], only: str) -> list[str]:
    """The rows whose name holds a word; there must be one."""
    found = [name for name in rows if only in name]
    if not found:
        raise AmorError(f"--only {only}: no row has this in its name; {nearest(only, rows)}")
    return found


class Table:
    """The rows of a suite. `quick`: small shapes to see that everything runs, whose numbers say nothing."""

    def __init__(self, suite: str, quick: bool):
        self.suite, self.quick = suite, quick
        self.asked: list[str] = []
        self.rows: list[Row] = []

    @classmethod
    def of(cls, suite: str, args: argparse.Namespace) -> "Table":
        if args.cpu_time:
            count_cpu_time()
        return cls(suite, args.quick)

    def ask(self, name: str) -> None:
        """What follows is measured because this was asked for; rows are named so."""
        self.asked.append(name)

    def row(self, what: str, *ops: str, **shape: Any) -> Row:
        name = self.asked[-1] if self.asked else what
        new = Row(name, what, shape, {op: choice(op, "cpu")[0] for op in ops})
        self.rows.append(new)
        return new

    def result(self) -> dict[str, Any]:
        """As JSON, comparable across commits."""
        here = replace(machine.describe(), gemm_gflops=machine.gemm_rate(), read_gbs=machine.bandwidth())
        return {
            "suite": self.suite,
            "quick": self.quick,
            "clock": clock_name(),
            "commit": commit(),
            "machine": typed.tree(here),
            "kernels": {op: choice(op, "cpu")[0] for op in BACKENDS},
            "asked": self.asked,
            "rows": [asdict(row) for row in self.rows],
        }


def commit() -> str | None:
    """The commit of the source tree, None where it is not a git tree."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:  # no git
        return None
    return said.stdout.strip() or None
