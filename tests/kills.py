"""Kill a run with kill -9 at random moments, let it go on, and compare its bits with a run that was never stopped.

    python tests/kills.py --models amor-mamba2,transformer --kills 20 --steps 200

Every second kill is aimed at the write of a checkpoint. The suite does one kill; this is the same law as often as asked.
"""

import argparse
import json
import multiprocessing
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from training import corpus, left_by, same, small_recipe

from amor.presets import NAMES
from amor.records.run import Step
from amor.run import Run
from amor.train import checkpoint
from amor.train.loop import train
from amor.train.recipe import Recipe
from amor.train.watch import Observer, Saved

# a server that has imported once what a run imports gives birth to every run: seconds saved a kill
BIRTH = multiprocessing.get_context("forkserver")
BIRTH.set_forkserver_preload(["amor.train.loop", "torch.distributed.checkpoint", "torch._dynamo"])


class Bell(Observer):
    """Tells another process when a step is done and how long a checkpoint took."""

    def __init__(self, wire: Connection):
        self.wire = wire

    def on_step(self, metrics: Step) -> None:
        self.wire.send(("step", metrics.step))

    def on_checkpoint(self, saved: Saved) -> None:
        self.wire.send(("checkpoint", saved.seconds))


def run_alone(recipe: Recipe, out: Path, wire: Connection) -> None:
    """The whole run, in a process of its own."""
    import torch

    torch.set_num_threads(1)
    train(recipe, out, observers=[Bell(wire)])


def started(recipe: Recipe, out: Path) -> tuple[Any, Connection]:
    """A run, new or going on, and the wire on which it tells."""
    ear, mouth = BIRTH.Pipe(duplex=False)
    process = BIRTH.Process(target=run_alone, args=(recipe, out, mouth))
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


def finished(recipe: Recipe, out: Path) -> tuple[dict[str, Any], list[float]]:
    """A run to its end: what it left, and the seconds that each checkpoint took."""
    process, ear = started(recipe, out)
    seconds = [value for what, value in heard(ear) if what == "checkpoint"]
    process.join()
    assert process.exitcode == 0, f"the run in {out} ended with {process.exitcode}"
    return left_by(out), seconds


def kill(recipe: Recipe, out: Path, step: int, wait: float) -> None:
    """Start a run and kill it `wait` seconds after a step."""
    process, ear = started(recipe, out)
    assert ("step", step) in heard(ear)
    time.sleep(wait)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL, f"the run ended with {process.exitcode} before it was killed"


def moments(recipe: Recipe, kills: int, seconds: float, chance: random.Random) -> Iterator[tuple[int, float]]:
    """(step, seconds after it): by turns anywhere, and inside the `seconds` that the write of a checkpoint takes."""
    every = recipe.checkpoint.every
    for number in range(kills):
        if number % 2:
            yield every * chance.randint(1, (recipe.total_steps - 1) // every), chance.uniform(0, seconds)
        else:
            yield chance.randint(1, recipe.total_steps - 2), chance.uniform(0, 0.01)


def survives(recipe: Recipe, out: Path, whole: dict[str, Any], step: int, wait: float) -> dict[str, Any]:
    """Kill a fresh run once, see that every checkpoint it lists is whole, let it go on, and compare the bits."""
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
    for step, wait in moments(recipe, kills, min(seconds), random.Random(f"{name} {kills} {steps}")):
        found.append(survives(recipe, folder / "run", whole, step, wait))
        print(json.dumps({"model": name, **found[-1]}), flush=True)
        shutil.rmtree(folder / "run")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(NAMES), help="architectures, with commas (default: all eight)")
    parser.add_argument("--kills", type=int, default=20, help="a model (default 20)")
    parser.add_argument("--steps", type=int, default=200, help="of the whole run (default 200)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        data = corpus(Path(folder))
        for name in args.models.split(","):
            began = time.perf_counter()
            found = campaign(name, data, Path(folder) / name, args.kills, args.steps)
            inside = sum(one["inside a write"] for one in found)
            words = f"{name}: {len(found)} kills, {inside} inside the write of a checkpoint, all bit-identical"
            print(f"{words}; {time.perf_counter() - began:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
