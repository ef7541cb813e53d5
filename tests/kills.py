"""Kill a run with kill -9 at random moments, let it go on, and compare its bits
with a run that was never stopped.

    python tests/kills.py --models amor-mamba2,transformer --kills 20 --steps 200
    python tests/kills.py --all

Every second kill is aimed at the write of a checkpoint. The suite does one kill; this is the same
law as often as asked. `--all`: runs of three kills each, over every width, vocabulary, number of
threads and gated architecture of `Case`, in which in every second step a lone token of the
micro-batch fires in a block; the suite does a few of them.
"""

import argparse
import itertools
import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from training import QUICK, corpus, left_by, same, small_recipe

from amor.data.shards import Shards
from amor.presets import NAMES
from amor.records.run import Step
from amor.run import Run
from amor.train import checkpoint
from amor.train.loop import train
from amor.train.recipe import Recipe
from amor.train.watch import CheckpointSaved, Observer

# threads that wait give way: a machine that does other work besides would take ten times as long
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# a server that has imported once what a run imports gives birth to every run: seconds saved a kill
BIRTH = multiprocessing.get_context("forkserver")
BIRTH.set_forkserver_preload(["amor.train.loop", "torch._dynamo"])


class Bell(Observer):
    """Tells another process when a step is done and how long a checkpoint took."""

    def __init__(self, wire: Connection):
        self.wire = wire

    def on_step(self, metrics: Step) -> None:
        self.wire.send(("step", metrics.step))

    def on_checkpoint(self, saved: CheckpointSaved) -> None:
        self.wire.send(("checkpoint", saved.seconds))


def run_alone(recipe: Recipe, out: Path, wire: Connection, threads: int) -> None:
    """The whole run, in a process of its own."""
    import torch

    torch.set_num_threads(threads)
    train(recipe, out, observers=[Bell(wire)])


def started(recipe: Recipe, out: Path, threads: int = 1) -> tuple[Any, Connection]:
    """A run, new or going on, and the wire on which it tells."""
    ear, mouth = BIRTH.Pipe(duplex=False)
    process = BIRTH.Process(target=run_alone, args=(recipe, out, mouth, threads))
    process.start()
    mouth.close()
    return process, ear


def heard(ear: Connection) -> Iterator[tuple[str, float]]:
    """What a run tells, until it is over."""
    while True:
        try:
            yield ear.recv()
        except EOFError:
            return


def finished(recipe: Recipe, out: Path, threads: int = 1) -> tuple[dict[str, Any], list[float]]:
    """A run to its end: what it left, and the seconds that each checkpoint took."""
    process, ear = started(recipe, out, threads)
    seconds = [value for what, value in heard(ear) if what == "checkpoint"]
    process.join()
    assert process.exitcode == 0, f"the run in {out} ended with {process.exitcode}"
    return left_by(out), seconds


def kill(recipe: Recipe, out: Path, step: int, wait: float, threads: int = 1) -> None:
    """Start a run and kill it `wait` seconds after a step."""
    process, ear = started(recipe, out, threads)
    assert ("step", step) in heard(ear)
    time.sleep(wait)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL, (
        f"the run ended with {process.exitcode} before it was killed"
    )


def moments(
    recipe: Recipe, kills: int, seconds: float, chance: random.Random
) -> Iterator[tuple[int, float]]:
    """(step, seconds after it): by turns anywhere, and inside the `seconds` that the
    write of a checkpoint takes."""
    every = recipe.checkpoint.every
    for number in range(kills):
        if number % 2:
            yield (
                every * chance.randint(1, (recipe.total_steps - 1) // every),
                chance.uniform(0, seconds),
            )
        else:
            yield chance.randint(1, recipe.total_steps - 2), chance.uniform(0, 0.01)


def survives(
    recipe: Recipe, out: Path, whole: dict[str, Any], step: int, wait: float
) -> dict[str, Any]:
    """Kill a fresh run once, see that every checkpoint it lists is whole, let it
    go on, and compare the bits."""
    kill(recipe, out, step, wait)
    known = checkpoint.listed(Run(out))
    assert all(checkpoint.problem_with(folder) is None for folder in known)
    found = {
        "step": step,
        "wait": round(wait, 4),
        "kept": checkpoint.step_of(known[-1]) if known else 0,
        "inside a write": any((out / "checkpoints").glob(f"{checkpoint.WRITING}*")),
    }
    assert step - found["kept"] <= recipe.checkpoint.every, found
    same(finished(recipe, out)[0], whole)
    return found


def campaign(name: str, data: Path, folder: Path, kills: int, steps: int) -> list[dict[str, Any]]:
    """All kills of one architecture; AssertionError at the first run that is not bit-identical."""
    recipe = small_recipe(data, name, steps=steps, eval={"every": 100}, checkpoint={"every": 20})
    whole, seconds = finished(recipe, folder / "whole")
    assert whole["trainer"]["step"] == steps
    found = []
    for step, wait in moments(
        recipe, kills, min(seconds), random.Random(f"{name} {kills} {steps}")
    ):
        found.append(survives(recipe, folder / "run", whole, step, wait))
        print(json.dumps({"model": name, **found[-1]}), flush=True)
        shutil.rmtree(folder / "run")
    return found


STEPS, EVERY, KILLED_AFTER = 60, 10, (12, 25, 43)
TOKENIZERS = ("bytes", "bpe:300")
LONE = QUICK | {"blocks.gate": "training.Lone", "blocks.count": 2}


@dataclass(frozen=True)
class Case:
    """A run of sixty steps that is killed three times."""

    width: int
    tokenizer: str
    threads: int
    model: str

    def recipe(self, data: Path) -> Recipe:
        pattern = self.model.removeprefix("amor-").replace("-", "_")
        vocab = Shards.open(data / "train").vocab
        changes = LONE | {"width": self.width, "vocab": vocab, "pattern": pattern}
        often = {"eval": {"every": 20}, "checkpoint": {"every": EVERY}}
        return small_recipe(data, self.model, changes, steps=STEPS, **often)


WIDTHS, THREADS, MODELS = (64, 128, 256), (1, 2), ("amor-mamba2", "amor-gated-deltanet")
ALL = [Case(*picked) for picked in itertools.product(WIDTHS, TOKENIZERS, THREADS, MODELS)]
# every two choices meet in one of them
FEW = [
    Case(64, "bytes", 1, "amor-mamba2"),
    Case(64, "bpe:300", 2, "amor-gated-deltanet"),
    Case(128, "bytes", 2, "amor-gated-deltanet"),
    Case(128, "bpe:300", 1, "amor-mamba2"),
    Case(256, "bytes", 2, "amor-mamba2"),
    Case(256, "bpe:300", 1, "amor-gated-deltanet"),
]


def alone(metrics: list[dict[str, Any]], recipe: Recipe) -> list[int]:
    """The steps, of one micro-batch each, in which a block fired on one token."""
    assert recipe.batch == recipe.micro_batch
    return [
        line["step"]
        for line in metrics
        if any(round(b["fire"] * recipe.step_tokens) == 1 for b in line.get("blocks", ()))
    ]


def survives_three(case: Case, data: Path, folder: Path) -> list[int]:
    """Kill a run three times and compare its bits with those of a whole one; the
    steps in which a lone token fired.

    Every stretch computed by a process that resumed must hold such a step: a product of one row is
    where torch's bits depend on how weights lie in memory.
    """
    recipe = case.recipe(data)
    whole, _ = finished(recipe, folder / "whole", case.threads)
    lone = alone(whole["metrics"], recipe)
    for killed, following in zip(KILLED_AFTER, (*KILLED_AFTER[1:], STEPS), strict=True):
        began = killed // EVERY * EVERY
        assert any(began < step <= following for step in lone), (
            f"no lone token fired in steps {began + 1}..{following}: {lone}"
        )
    for step in KILLED_AFTER:
        kill(recipe, folder / "run", step, 0.0, case.threads)
    same(finished(recipe, folder / "run", case.threads)[0], whole)
    return lone


def all_cases(folder: Path) -> None:
    """Every case; AssertionError at the first that is not bit-identical."""
    data = {name: corpus(folder / name.replace(":", "-"), name) for name in TOKENIZERS}
    for number, case in enumerate(ALL):
        began = time.perf_counter()
        lone = survives_three(case, data[case.tokenizer], folder / str(number))
        print(
            (
                f"{case}: bit-identical, a lone token in {len(lone)} steps; "
                f"{time.perf_counter() - began:.0f} s"
            ),
            flush=True,
        )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--models", default=",".join(NAMES), help="architectures, with commas (default: all eight)"
    )
    parser.add_argument("--kills", type=int, default=20, help="a model (default 20)")
    parser.add_argument("--steps", type=int, default=200, help="of the whole run (default 200)")
    parser.add_argument("--all", action="store_true", help="three kills of every case instead")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if args.all:
            all_cases(Path(folder))
            return 0
        data = corpus(Path(folder))
        for name in args.models.split(","):
            began = time.perf_counter()
            found = campaign(name, data, Path(folder) / name, args.kills, args.steps)
            inside = sum(one["inside a write"] for one in found)
            words = (
                f"{name}: {len(found)} kills, {inside} inside the write of a checkpoint, "
                "all bit-identical"
            )
            print(f"{words}; {time.perf_counter() - began:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
