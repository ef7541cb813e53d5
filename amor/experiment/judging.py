"""Measures runs: each measurement is a file, written whole, with a fingerprint of everything it
depends on.

    python -m amor.experiment.judging STUDY KINDS RUN [RUN ...]

measures what of these is missing, one after the other. A kind is a file of amor/measures.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from filelock import FileLock

from amor import typed
from amor.errors import AmorError
from amor.experiment.jobs import end_with_parent
from amor.experiment.subject import FinishedRun, step_of
from amor.files import replace_file
from amor.records import Record
from amor.run import Run
from amor.study.definition import (
    JUDGED,
    LEDGER,
    Measurement,
    PlannedRun,
    Study,
    StudyLedger,
    find_measure,
)
from amor.train.recipe import Recipe

LOCK = "lock"


def file_of(run: Run, kind: str) -> Path:
    """Where the measurement of a kind is kept."""
    return run.folder / JUDGED / f"{kind}.json"


def fingerprint(subject: FinishedRun, kind: str, options: Record) -> str:
    """A hash of the weights, the text, the options, the version of the measurement, and the threads
    that compute it."""
    measure = find_measure(kind)
    text = subject.held_out.hash if measure.needs_text and subject.prepared else ""
    # files from before there were versions have no number
    code = kind if measure.version == 1 else f"{kind} {measure.version}"
    recipe = subject.recipe.to_dict() | {"data": ""}
    parts = [code, subject.weights, text, typed.tree(options), recipe, subject.threads]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def measurements_for(recipe: Recipe, study: Study) -> dict[str, Record]:
    """Kind -> options of what a study measures of runs of a recipe."""
    return study.measurements(gated=recipe.config().blocks.count > 0)


def missing(subject: FinishedRun, study: Study) -> dict[str, Record]:
    """Those that have no file, or a stale one."""
    asked = measurements_for(subject.recipe, study).items()
    return {kind: options for kind, options in asked if not up_to_date(subject, kind, options)}


def up_to_date(subject: FinishedRun, kind: str, options: Record) -> bool:
    """Whether the file is there and of these weights, text and options."""
    path = file_of(subject.run, kind)
    if not path.is_file():
        return False
    return typed.read(Measurement, path).fingerprint == fingerprint(subject, kind, options)


def measure(subject: FinishedRun, kind: str, options: Record) -> Measurement:
    """Measure, and write the file."""
    began = time.perf_counter()
    result = find_measure(kind).measure(subject, options)
    assert type(result) is find_measure(kind).Result
    seconds, mark = time.perf_counter() - began, fingerprint(subject, kind, options)
    file = Measurement(kind=kind, fingerprint=mark, seconds=seconds, result=typed.tree(result))
    path = file_of(subject.run, kind)
    path.parent.mkdir(exist_ok=True)
    replace_file(path, typed.text(file), mark="writing")
    return file


@contextmanager
def collecting_errors(name: str, failed: list[str]) -> Iterator[None]:
    """An error of one measurement becomes a line, and stops no other."""
    try:
        yield
    except AmorError as error:
        failed.append(f"{name}: {error}")
        print(f"judging: {failed[-1]}", file=sys.stderr, flush=True)


def work(folder: Path, kinds: set[str], runs: set[str]) -> list[str]:
    """Measure what is missing; the errors, one line each."""
    ledger, failed = typed.read(StudyLedger, folder / LEDGER), list[str]()
    torch.set_num_threads(ledger.study.threads)
    for planned in ledger.runs:
        if planned.folder in runs:
            with collecting_errors(planned.folder, failed):
                _measure_run(Run(folder / planned.folder), planned, ledger, kinds, failed)
    return failed


def _measure_run(
    run: Run, planned: PlannedRun, ledger: StudyLedger, kinds: set[str], failed: list[str]
) -> None:
    # a study that was killed may have left a program that works on it
    with FileLock(run.folder / LOCK):
        subject = FinishedRun(run, ledger.study.threads, ledger.data)
        if step_of(run) != planned.steps:
            raise AmorError("not trained to its end")
        for kind, options in measurements_for(subject.recipe, ledger.study).items():
            with collecting_errors(f"{planned.folder}: {kind}", failed):
                if kind in kinds and not up_to_date(subject, kind, options):
                    done = measure(subject, kind, options)
                    print(f"{planned.folder}: {kind} in {done.seconds:.1f} s", flush=True)


def main(words: list[str]) -> int:
    """Measure what the command line names; the exit code."""
    end_with_parent()
    folder, kinds, *runs = words
    failed = list[str]()
    with collecting_errors(folder, failed):
        failed += work(Path(folder), set(kinds.split(",")), set(runs))
    if failed:
        print("; ".join(failed), file=sys.stderr)  # a study shows the last line of a log
    return 2 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
