"""Judgements of a run: each a file, written whole, with a fingerprint of everything it depends on.

    python -m amor.experiment.judging STUDY KINDS RUN [RUN ...]     what of these is missing, one after the other

A kind is a file amor/experiment/kinds/<kind>.py with `judge(subject, asked)`, a field of records.study.Judging that says what may
be asked of it, and a row of records.study.FOUND that says what it finds.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from amor import typed
from amor.errors import AmorError
from amor.experiment.subject import Subject, step_of
from amor.files import replace_file
from amor.records import Part
from amor.records.study import FOUND, JUDGED, LEDGER, Judgement, Judging, Ledger, Planned
from amor.run import Run
from amor.train.recipe import Recipe

LOCK = "lock"
ALONE = frozenset({"speed"})  # measured with nothing beside it
TEXTLESS = frozenset({"size", "gate", "recall"})  # no text has a part in them
GATED = frozenset({"gate", "value", "rates"})  # asked of models with gates only


def judge(kind: str) -> Callable[[Subject, Any], Part]:
    found: Callable[[Subject, Any], Part] = importlib.import_module(f"amor.experiment.kinds.{kind}").judge
    return found


def file_of(run: Run, kind: str) -> Path:
    return run.folder / JUDGED / f"{kind}.json"


def fingerprint(subject: Subject, kind: str, asked: Part) -> str:
    """Of the weights, the text, what is asked and the threads that compute it."""
    text = "" if kind in TEXTLESS or not subject.prepared else subject.held_out.hash
    made_by = [kind, subject.weights, text, typed.tree(asked), subject.recipe.to_dict() | {"data": ""}, subject.threads]
    return hashlib.sha256(json.dumps(made_by, sort_keys=True).encode()).hexdigest()


def asked_of(recipe: Recipe, judging: Judging) -> dict[str, Part]:
    """What a study asks of runs of a recipe."""
    gated = recipe.config().blocks.count > 0
    return {kind: one for kind, one in judging.asked().items() if gated or kind not in GATED}


def missing(subject: Subject, judging: Judging) -> dict[str, Part]:
    """Those that have no file, or one that was made of something else."""
    return {kind: one for kind, one in asked_of(subject.recipe, judging).items() if not stands(subject, kind, one)}


def stands(subject: Subject, kind: str, asked: Part) -> bool:
    path = file_of(subject.run, kind)
    return path.is_file() and typed.read(Judgement, path).fingerprint == fingerprint(subject, kind, asked)


def judged(subject: Subject, kind: str, asked: Part) -> Judgement:
    """Judge, and write it down."""
    began = time.perf_counter()
    found = judge(kind)(subject, asked)
    assert type(found) is FOUND[kind]
    seconds, mark = time.perf_counter() - began, fingerprint(subject, kind, asked)
    one = Judgement(kind=kind, fingerprint=mark, seconds=seconds, found=typed.tree(found))
    path = file_of(subject.run, kind)
    path.parent.mkdir(exist_ok=True)
    replace_file(path, typed.text(one), mark="writing")
    return one


@contextmanager
def alone(run: Run) -> Iterator[None]:
    """While nobody else works on a run: a study that was killed may have left somebody who does."""
    with (run.folder / LOCK).open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield


def work(folder: Path, kinds: set[str], runs: set[str]) -> None:
    ledger = typed.read(Ledger, folder / LEDGER)
    torch.set_num_threads(ledger.study.threads)
    for planned in ledger.runs:
        if planned.folder in runs:
            _judge_run(Run(folder / planned.folder), planned, ledger, kinds)


def _judge_run(run: Run, planned: Planned, ledger: Ledger, kinds: set[str]) -> None:
    with alone(run):
        subject = Subject(run, ledger.study.threads, ledger.data)
        if step_of(run) != planned.steps:
            raise AmorError(f"{run.folder} is not trained to its end")
        for kind, one in missing(subject, ledger.study.judge).items():
            if kind in kinds:
                found = judged(subject, kind, one)
                print(f"{planned.folder}: {kind} in {found.seconds:.1f} s", flush=True)


def main(words: list[str]) -> int:
    folder, kinds, *runs = words
    try:
        work(Path(folder), set(kinds.split(",")), set(runs))
    except AmorError as error:
        print(f"judging: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
