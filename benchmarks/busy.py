"""A busy machine: the speed that training and decode keep beside a program that occupies one core.

  python -m benchmarks busy
  python -m benchmarks busy --quick --only decode

Three ways in which threads wait at a barrier take turns, each in a process of its own: `spin` as
torch ships it, `amor` as amor/threads.py sets it, and `passive` (OMP_WAIT_POLICY). A round is some
seconds of steps of each, alone; then the same beside a loop that uses one core. Kept under load:
the speed beside the loop over the speed alone. Quiet over spinning: the speed alone over that of
`spin`. The machine must be quiet and all its cores in use (no OMP_NUM_THREADS=1), or the numbers
mean nothing.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from amor.bench.batch import decode_round
from amor.bench.table import BenchmarkRow, BenchmarkTable, matching
from amor.bench.timing import from_rounds
from amor.bench.train import stepper
from amor.decode.engine import Engine
from amor.errors import AmorError
from amor.models.build import build
from amor.presets import preset
from amor.threads import VARIABLES
from amor.train.recipe import load

RECIPE = "tiny/amor-mamba2"
TOKENS = 32  # decoded per piece of work
ALONE, BESIDE = "alone", "beside"
# way of waiting -> its environment variables
WAYS: dict[str, dict[str, str]] = {
    # torch's own default, but set explicitly: decode then uses OpenMP's threads too
    "spin": {"GOMP_SPINCOUNT": "300000"},
    "amor": {},
    "passive": {"OMP_WAIT_POLICY": "passive"},
}
ROOT = Path(__file__).parent.parent
# a loop that uses one core, and ends with the process that started it
LOOP = """
import os
parent = os.getppid()
while os.getppid() == parent:
    for _ in range(100_000): pass
"""
Work = tuple[Callable[[], Any], int]  # a piece of work, and how many steps it has


def training(quick: bool) -> Work:
    """A training step of a tiny recipe."""
    small = {"batch": 2, "micro_batch": 2, "context": 16}
    return stepper(load(RECIPE, (), **(small if quick else {}))), 1


def decode(quick: bool) -> Work:
    """Some decode steps of one row."""
    torch.manual_seed(0)
    tokens = 2 if quick else TOKENS
    engine = Engine(build(preset("amor-mamba2", "tiny")).eval())
    return decode_round(engine, 1, tokens), tokens


# name -> function that prepares the work, and the unit of a step
ROWS: dict[str, tuple[Callable[[bool], Work], str]] = {
    "training": (training, "steps"),
    "decode": (decode, "tokens"),
}


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the suite."""
    add = parser.add_argument
    add("--rounds", type=int, default=5, help="rounds per way, in turn (default 5)")
    add("--seconds", type=float, default=5.0, help="per way and round, at least (default 5)")
    add("--only", default="", help=f"rows whose name contains this word: {', '.join(ROWS)}")
    help_ = "small shapes and short rounds, only to see that everything runs"
    add("--quick", action="store_true", help=help_)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure, print, and return the table for JSON."""
    table = BenchmarkTable("busy", args.quick)
    if not args.seconds > 0:
        raise AmorError(f"--seconds {args.seconds}: more than 0 are needed")
    seconds = min(args.seconds, 0.05) if args.quick else args.seconds
    for name in matching(ROWS, args.only):
        table.request(name)
        measure(table, name, args.rounds, seconds).show()
    return table.result()


def measure(table: BenchmarkTable, name: str, rounds: int, seconds: float) -> BenchmarkRow:
    """Every way of waiting, alone and beside the loop."""
    ops = ("scan", "conv", "head", "linear", "product")
    row = table.row("a busy machine", *ops, recipe=RECIPE, seconds=seconds)
    taken: dict[tuple[str, str], list[float]] = {
        (way, load): [] for way in WAYS for load in (ALONE, BESIDE)
    }
    with ExitStack() as stack:
        workers = {w: stack.enter_context(worker(name, w, table.quick)) for w in WAYS}
        for _ in range(rounds):
            for way, measure_step in workers.items():
                taken[way, ALONE].append(measure_step(seconds))
            with loop():
                for way, measure_step in workers.items():
                    taken[way, BESIDE].append(measure_step(seconds))
    times = {f"{way}, {load}": from_rounds(each) for (way, load), each in taken.items()}
    row.times |= times
    row.numbers |= {f"{ROWS[name][1]}/s, {side}": 1 / each.median for side, each in times.items()}
    for way in WAYS:
        alone, beside = times[f"{way}, {ALONE}"], times[f"{way}, {BESIDE}"]
        row.add_ratio(f"kept under load, {way}", alone, beside)
        if way != "spin":
            row.add_ratio(f"quiet over spinning, {way}", times[f"spin, {ALONE}"], alone)
    return row


@contextmanager
def worker(name: str, way: str, quick: bool) -> Iterator[Callable[[float], float]]:
    """A process whose threads wait in one way. The function it gives runs the work there for at
    least some seconds, and returns the seconds of one step."""
    code = f"import amor; from benchmarks.busy import serve; serve({name!r}, {quick})"
    environment = {key: value for key, value in os.environ.items() if key not in VARIABLES}
    environment |= WAYS[way] | {
        "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    }
    command, pipe = [sys.executable, "-c", code], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment) as process:
        assert process.stdin and process.stdout
        requests, answers = process.stdin, process.stdout

        def measure_step(seconds: float) -> float:
            requests.write(f"{seconds}\n")
            requests.flush()
            line = answers.readline()
            if not line:
                code = process.wait()
                raise AmorError(f"busy: the process of {name}, {way} ended with exit code {code}")
            return float(json.loads(line))

        try:
            measure_step(0)  # it is ready, and has warmed up
            yield measure_step
        finally:
            process.kill()


def serve(name: str, quick: bool) -> None:
    """The worker's side: for every line of seconds, work for at least so long and print the seconds
    of one step."""
    work, steps = ROWS[name][0](quick)
    for line in sys.stdin:
        seconds, count, begin = float(line), 0, time.perf_counter()
        while not count or time.perf_counter() - begin < seconds:
            work()
            count += steps
        print(json.dumps((time.perf_counter() - begin) / count), flush=True)


@contextmanager
def loop() -> Iterator[None]:
    """Another program that occupies a whole core."""
    with subprocess.Popen([sys.executable, "-c", LOOP]) as process:
        try:
            yield
        finally:
            process.kill()
