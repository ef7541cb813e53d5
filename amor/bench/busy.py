"""A busy machine: how much of its quiet speed training and decode keep beside a program that takes a core, by how threads wait.

  amor bench busy
  amor bench busy --quick --only decode

Three ways of waiting take turns, each in a process of its own: `spin` as torch ships it, `amor` as
amor/threads.py sets it, and `passive` (OMP_WAIT_POLICY). A round is some seconds of steps of each, alone; then the same beside
a loop that uses one core. Kept under load: the speed beside the loop over the speed alone. Quiet over spinning: the speed alone
over that of `spin`. The machine must be quiet and all its cores in use (no OMP_NUM_THREADS=1), or the numbers say nothing.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from amor.bench.batch import decoding
from amor.bench.table import Row, Table, named
from amor.bench.timing import of_rounds
from amor.bench.train import stepper
from amor.decode.engine import Engine
from amor.errors import AmorError
from amor.models.build import build
from amor.presets import preset
from amor.threads import VARIABLES
from amor.train.recipe import load

RECIPE = "tiny/amor-mamba2"
TOKENS = 32  # of decode, in one piece of work
ALONE, BESIDE = "alone", "beside"
# way of waiting -> what is imported first, what the environment says
WAYS: dict[str, tuple[str, dict[str, str]]] = {
    "spin": ("amor", {"GOMP_SPINCOUNT": "300000"}),  # as torch ships it, said aloud: decode then uses OpenMP's threads too
    "amor": ("amor", {}),
    "passive": ("amor", {"OMP_WAIT_POLICY": "passive"}),
}
# a loop that uses one core, and ends with whoever started it
LOOP = "import os\nparent = os.getppid()\nwhile os.getppid() == parent:\n    for _ in range(100_000): pass"


Work = tuple[Callable[[], Any], int]  # a piece of work, and how many steps it has


def training(quick: bool) -> Work:
    """A step of a tiny recipe."""
    small = {"batch": 2, "micro_batch": 2, "context": 16}
    return stepper(load(RECIPE, (), **(small if quick else {}))), 1


def decode(quick: bool) -> Work:
    """Some tokens of one row."""
    torch.manual_seed(0)
    tokens = 2 if quick else TOKENS
    return decoding(Engine(build(preset("amor-mamba2", "tiny")).eval()), 1, tokens), tokens


# name -> what makes the work ready, and what a step of it is
ROWS: dict[str, tuple[Callable[[bool], Work], str]] = {"training": (training, "steps"), "decode": (decode, "tokens")}


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--rounds", type=int, default=5, help="rounds of every way, in turn (default 5)")
    add("--seconds", type=float, default=5.0, help="of a way in a round, at least (default 5)")
    add("--only", default="", help=f"rows whose name holds this word: {', '.join(ROWS)}")
    add("--quick", action="store_true", help="small shapes and moments, to see that everything runs; no bar is judged")


def run(args: argparse.Namespace) -> dict[str, Any]:
    table = Table("busy", args.quick)
    if not args.seconds > 0:
        raise AmorError(f"--seconds {args.seconds}: more than 0 are needed")
    seconds = min(args.seconds, 0.05) if args.quick else args.seconds
    for name in named(ROWS, args.only):
        table.ask(name)
        measure(table, name, args.rounds, seconds).show()
    return table.result()


def measure(table: Table, name: str, rounds: int, seconds: float) -> Row:
    row = table.row("a busy machine", "scan", "conv", "head", "linear", "product", recipe=RECIPE, seconds=seconds)
    taken: dict[tuple[str, str], list[float]] = {(way, load): [] for way in WAYS for load in (ALONE, BESIDE)}
    with ExitStack() as stack:
        workers = {way: stack.enter_context(worker(name, way, table.quick)) for way in WAYS}
        for _ in range(rounds):
            for way, ask in workers.items():
                taken[way, ALONE].append(ask(seconds))
            with loop():
                for way, ask in workers.items():
                    taken[way, BESIDE].append(ask(seconds))
    times = {f"{way}, {load}": of_rounds(each) for (way, load), each in taken.items()}
    row.time(times)
    row.found |= {f"{ROWS[name][1]}/s, {side}": 1 / each.median for side, each in times.items()}
    for way in WAYS:
        row.ratio(f"kept under load, {way}", times[f"{way}, {ALONE}"], times[f"{way}, {BESIDE}"])
    for way in WAYS:
        if way != "spin":
            row.ratio(f"quiet over spinning, {way}", times[f"spin, {ALONE}"], times[f"{way}, {ALONE}"])
    return row


@contextmanager
def worker(name: str, way: str, quick: bool) -> Iterator[Callable[[float], float]]:
    """A process that waits in one way and holds the work ready: asked with seconds, it tells those of one step."""
    first, said = WAYS[way]
    code = f"import {first}; from amor.bench.busy import answer; answer({name!r}, {quick})"
    environment = {key: value for key, value in os.environ.items() if key not in VARIABLES} | said
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, text=True, env=environment) as process:
        assert process.stdin and process.stdout
        questions, answers = process.stdin, process.stdout

        def ask(seconds: float) -> float:
            questions.write(f"{seconds}\n")
            questions.flush()
            line = answers.readline()
            if not line:
                raise AmorError(f"bench busy: the process of {name}, {way} has ended with exit code {process.wait()}")
            return float(json.loads(line))

        try:
            ask(0)  # it stands ready, and has warmed up
            yield ask
        finally:
            process.kill()


def answer(name: str, quick: bool) -> None:
    """The worker's side: for every line of seconds, work for at least so long and tell those of one step."""
    work, steps = ROWS[name][0](quick)
    for line in sys.stdin:
        seconds, count, begin = float(line), 0, time.perf_counter()
        while not count or time.perf_counter() - begin < seconds:
            work()
            count += steps
        print(json.dumps((time.perf_counter() - begin) / count), flush=True)


@contextmanager
def loop() -> Iterator[None]:
    """Another program that takes a whole core."""
    with subprocess.Popen([sys.executable, "-c", LOOP]) as process:
        try:
            yield
        finally:
            process.kill()
