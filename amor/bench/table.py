"""What a benchmark found, row by row: shapes, backends, seconds, and each bar with what was reached."""

import argparse
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from amor.bench import machine
from amor.bench.timing import Times, clock_name, count_cpu_time
from amor.errors import AmorError, nearest
from amor.ops.backends import BACKENDS, choice


@dataclass(frozen=True)
class Bar:
    """A demand: `value` of `what` must be at least, or at most, `limit`. `met` is None where nothing is judged."""

    what: str
    value: float
    limit: float
    at_least: bool
    met: bool | None

    def words(self) -> str:
        sign = "≥" if self.at_least else "≤"
        mark = {True: "met", False: "MISSED", None: "not judged"}[self.met]
        return f"{self.what} {self.value:.3g} ({sign} {self.limit:g}: {mark})"


@dataclass
class Row:
    what: str
    shape: Mapping[str, Any]
    backends: Mapping[str, str]
    seconds: dict[str, float] = field(default_factory=dict)
    spread: dict[str, float] = field(default_factory=dict)  # median over best: how restless the machine was
    found: dict[str, float] = field(default_factory=dict)
    bars: list[Bar] = field(default_factory=list)

    def time(self, times: Mapping[str, Times]) -> None:
        for name, taken in times.items():
            self.seconds[name] = taken.best
            self.spread[name] = taken.median / taken.best

    def show(self) -> None:
        shape = ", ".join(f"{k}={v}" for k, v in self.shape.items())
        print(f"\n{self.what}  [{shape}]")
        for name, best in self.seconds.items():
            print(f"  {name:<34} {best * 1e3:>10.2f} ms   (median {self.spread.get(name, 1):.2f}x)")
        for name, value in self.found.items():
            print(f"  {name:<34} {value:>10,}" if isinstance(value, int) else f"  {name:<34} {value:>10.4g}")
        for bar in self.bars:
            print(f"  {bar.words()}")


def common(parser: argparse.ArgumentParser, rows: Iterable[str]) -> None:
    """The options every suite takes."""
    parser.add_argument("--quick", action="store_true", help="small shapes, to see that everything runs; no bar is judged")
    parser.add_argument("--rounds", type=int, default=5, help="rounds a side; the best is kept")
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
    """The rows of a suite. `quick`: small shapes to see that everything runs; no bar is judged."""

    def __init__(self, suite: str, quick: bool):
        self.suite, self.quick = suite, quick
        self.rows: list[Row] = []

    @classmethod
    def of(cls, suite: str, args: argparse.Namespace) -> "Table":
        if args.cpu_time:
            count_cpu_time()
        return cls(suite, args.quick)

    def row(self, what: str, *ops: str, **shape: Any) -> Row:
        new = Row(what, shape, {op: choice(op, "cpu")[0] for op in ops})
        self.rows.append(new)
        return new

    def bar(self, row: Row, what: str, value: float, at_least: float | None = None, at_most: float | None = None) -> None:
        limit = at_least if at_least is not None else at_most
        assert limit is not None
        holds = value >= limit if at_least is not None else value <= limit
        judged = not self.quick and clock_name() == "wall"
        row.bars.append(Bar(what, value, limit, at_least is not None, holds if judged else None))

    def result(self) -> dict[str, Any]:
        """As JSON, comparable across commits."""
        missed = [f"{row.what}: {bar.words()}" for row in self.rows for bar in row.bars if bar.met is False]
        print(f"\n{sum(len(r.bars) for r in self.rows) - len(missed)} bars met or not judged, {len(missed)} missed")
        for words in missed:
            print(f"  {words}")
        ceilings = {"gemm_gflops": machine.gemm_rate(), "read_gbs": machine.bandwidth()}
        return {
            "suite": self.suite,
            "quick": self.quick,
            "clock": clock_name(),
            "commit": commit(),
            "machine": machine.describe() | ceilings,
            "kernels": {op: choice(op, "cpu")[0] for op in BACKENDS},
            "rows": [asdict(row) for row in self.rows],
            "missed": missed,
            "ok": not missed,
        }


def commit() -> str | None:
    """The commit of the source tree, None where it is not a git tree."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:  # no git
        return None
    return said.stdout.strip() or None
