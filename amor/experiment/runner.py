"""Runs a study: trains what is missing, judges what is missing, and measures speeds at the end,
with nothing beside them.

Every run is an ordinary `amor train`, every judgement a file; so after a kill at any point the same
command goes on, and ends with the same numbers.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from amor.errors import AmorError, nearest
from amor.experiment import jobs
from amor.experiment.jobs import Job
from amor.experiment.judging import LOCK, file_of
from amor.experiment.plan import StudyPlan
from amor.experiment.progress import StudyProgress
from amor.experiment.status import Estimator, RunStatus, run_status
from amor.experiment.subject import step_of
from amor.study import results
from amor.study.definition import PlannedRun, find_measure

LOGS = "logs"


@dataclass(frozen=True)
class RunnerOptions:
    """How a study is to be run."""

    at_once: int  # programs that run at the same time
    only: tuple[str, ...] = ()  # rows, or folders of runs; nothing: all


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def picked(plan: StudyPlan, only: Sequence[str]) -> list[PlannedRun]:
    """The runs that names mean: of a row, or by folder."""
    known = {run.row for run in plan.runs} | {run.folder.removeprefix("runs/") for run in plan.runs}
    for name in only:
        if name.removeprefix("runs/") not in known:
            raise AmorError(
                f"--only {name}: no such run; {nearest(name, {run.row for run in plan.runs})}"
            )
    names = {name.removeprefix("runs/") for name in only}
    return [
        run for run in plan.runs if not only or {run.row, run.folder.removeprefix("runs/")} & names
    ]


class Runner:
    """Trains and measures what is missing of a study."""

    def __init__(
        self,
        plan: StudyPlan,
        options: RunnerOptions,
        clock: Estimator,
        say: Callable[[str], None] = print,
    ):
        self.plan, self.options, self.clock, self.say = plan, options, clock, say
        self.wanted = picked(plan, options.only)

    def go(self) -> dict[str, str]:
        """Everything that is missing of the runs asked for; what failed, by folder, with the last
        line of its log."""
        failed = self.train()
        self.forget_stale()
        shown = self.shown()
        for kinds, at_once in ((self._kinds(False), self.options.at_once), (self._kinds(True), 1)):
            failed |= self.judge(shown, kinds, at_once)
        return failed

    def status(self) -> list[RunStatus]:
        """How far every wanted run is."""
        return [run_status(self.plan, planned) for planned in self.wanted]

    def train(self) -> dict[str, str]:
        """Train what is missing; folder -> last line of the log, of runs that failed."""
        missing = [one.planned for one in self.status() if not one.trained]
        by_folder = {run.folder: run for run in missing}
        observer = StudyProgress("trained", self, len(missing))

        def needed(job: Job) -> bool:
            planned = by_folder[job.name]
            return step_of(self.plan.run(planned)) != planned.steps

        done = jobs.run(
            [self._training(run) for run in missing],
            self.options.at_once,
            self.plan.study.threads,
            observer,
            needed,
        )
        return {one.job.name: one.last_line for one in done if one.code}

    def _training(self, run: PlannedRun) -> Job:
        out = self.plan.folder / run.folder
        locked = [sys.executable, "-m", "amor.experiment.locked", str(out / LOCK)]
        command = [*locked, "train", run.recipe, "--out", str(out)]
        command += [word for change in run.changes for word in ("--set", change)]
        command += ["--data", self.plan.ledger.data] if self.plan.ledger.data else []
        return Job(run.folder, tuple(command), self._log(run.folder), out / LOCK)

    def forget_stale(self) -> None:
        """Judgements of other weights, another text or another question are none of this
        study's."""
        for planned in self.plan.runs:
            for kind in run_status(self.plan, planned).unjudged:
                file_of(self.plan.run(planned), kind).unlink(missing_ok=True)

    def shown(self) -> set[str]:
        """Folders of the runs that tables show: of each row the best learning rate."""
        study = results.Results(self.plan.ledger, self.plan.folder)
        return {one.planned.folder for ones in study.shown.values() for one in ones}

    def judge(self, shown: set[str], kinds: set[str], at_once: int) -> dict[str, str]:
        """What is missing of some kinds, the runs dealt out to as many programs as may run at
        once."""
        lacking = [
            one.planned
            for one in self.status()
            if one.planned.folder in shown and kinds & set(one.unjudged)
        ]
        hands = [lacking[n::at_once] for n in range(at_once)]
        todo = [self._judging(hand, kinds) for hand in hands if hand]
        done = jobs.run(
            todo,
            at_once,
            self.plan.study.threads,
            StudyProgress("judged", self, len(todo)),
            lambda job: True,
        )
        return {one.job.name: one.last_line for one in done if one.code}

    def _judging(self, runs: list[PlannedRun], kinds: set[str]) -> Job:
        name = (
            f"{', '.join(sorted(kinds))} of {len(runs)} runs from "
            f"{runs[0].folder.removeprefix('runs/')} on"
        )
        words = [str(self.plan.folder), ",".join(sorted(kinds)), *(run.folder for run in runs)]
        command = (sys.executable, "-m", "amor.experiment.judging", *words)
        return Job(name, command, self._log(f"judged/{runs[0].folder}"))

    def _kinds(self, timed: bool) -> set[str]:
        """Those that need a quiet machine, or the others."""
        return {
            kind
            for kind in self.plan.study.measurements()
            if find_measure(kind).quiet_machine == timed
        }

    def _log(self, name: str) -> Path:
        return self.plan.folder / LOGS / f"{name.replace('/', '-')}.log"
