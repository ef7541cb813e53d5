"""Judgements of a run: each a file, written whole, with a fingerprint of everything it depends on.

    python -m amor.experiment.judging STUDY KINDS RUN [RUN ...]     what of these is missing, one after the other

A kind is a file amor/experiment/kinds/<kind>.py with `judge(subject, asked)` and its `VERSION`, a field of records.study.Judging
that says what may be asked of it, and a row of records.study.FOUND that says what it finds.
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
from types import ModuleType
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
TEXTLESS = frozenset({"size", "gate", "recall", "reach"})  # no text has a part in them


def judge(kind: str) -> Callable[[Subject, Any], Part]:
    found: Callable[[Subject, Any], Part] = _room(kind).judge
    return found


def version(kind: str) -> int:
    found: int = _room(kind).VERSION
    return found


def _room(kind: str) -> ModuleType:
    return importlib.import_module(f"amor.experiment.kinds.{kind}")


def file_of(run: Run, kind: str) -> Path:
    return run.folder / JUDGED / f"{kind}.json"


def fingerprint(subject: Subject, kind: str, asked: Part) -> str:
    """Of the weights, the text, what is asked, the code that answers by its version, and the threads that compute it."""
    text = "" if kind in TEXTLESS or not subject.prepared else subject.held_out.hash
    code = kind if version(kind) == 1 else f"{kind} {version(kind)}"  # the first ones were made before there were versions
    made_by = [code, subject.weights, text, typed.tree(asked), subject.recipe.to_dict() | {"data": ""}, subject.threads]
    return hashlib.sha256(json.dumps(made_by, sort_keys=True).encode()).hexdigest()


def asked_of(recipe: Recipe, judging: Judging) -> dict[str, Part]:
    """What a study asks of runs of a recipe."""
    return judging.asked(gated=recipe.config().blocks.count > 0)


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


@contextmanager
def said(name: str, failed: list[str]) -> Iterator[None]:
    """What goes wrong with one judgement is a line, and stops no other."""
    try:
        yield
    except AmorError as error:
        failed.append(f"{name}: {error}")
        print(f"judging: {failed[-1]}", file=sys.stderr, flush=True)


def work(folder: Path, kinds: set[str], runs: set[str]) -> list[str]:
    """Judge what is missing; what failed, in words."""
    ledger, failed = typed.read(Ledger, folder / LEDGER), list[str]()
    torch.set_num_threads(ledger.study.threads)
    for planned in ledger.runs:
        if planned.folder in runs:
            with said(planned.folder, failed):
                _judge_run(Run(folder / planned.folder), planned, ledger, kinds, failed)
    return failed


def _judge_run(run: Run, planned: Planned, ledger: Ledger, kinds: set[str], failed: list[str]) -> None:
    with alone(run):
        subject = Subject(run, ledger.study.threads, ledger.data)
        if step_of(run) != planned.steps:
            raise AmorError("not trained to its end")
        for kind, one in asked_of(subject.recipe, ledger.study.judge).items():
            with said(f"{planned.folder}: {kind}", failed):
                if kind in kinds and not stands(subject, kind, one):
                    found = judged(subject, kind, one)
                    print(f"{planned.folder}: {kind} in {found.seconds:.1f} s", flush=True)


def main(words: list[str]) -> int:
    folder, kinds, *runs = words
    failed = list[str]()
    with said(folder, failed):
        failed += work(Path(folder), set(kinds.split(",")), set(runs))
    if failed:
        print("; ".join(failed), file=sys.stderr)  # the last line is what a study tells
    return 2 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
