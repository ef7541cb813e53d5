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
    names = {name.removeprefix("runs/"): name for name in only}
    known = {run.folder: {run.row, run.folder.removeprefix("runs/")} for run in plan.runs}
    unknown = [given for name, given in names.items() if name not in set().union(*known.values())]
    if unknown:
        rows = nearest(unknown[0], plan.ledger.rows)
        raise AmorError(f"--only {unknown[0]}: no such run; {rows}")
    return [run for run in plan.runs if not only or known[run.folder] & names.keys()]


class Runner:
    """Trains and measures what is missing of a study."""

    def __init__(self, plan: StudyPlan, options: RunnerOptions, clock: Estimator):
        self.plan, self.options, self.clock = plan, options, clock
        self.wanted = picked(plan, options.only)

    def go(self) -> dict[str, str]:
        """Everything that is missing of the runs asked for; what failed, by folder, with the last
        line of its log."""
        failed = self.train()
        self.forget_stale()
        failed |= self.judge(quiet=False, at_once=self.options.at_once)
        return failed | self.judge(quiet=True, at_once=1)

    def status(self) -> list[RunStatus]:
        """How far every wanted run is."""
        return [run_status(self.plan, planned) for planned in self.wanted]

    def train(self) -> dict[str, str]:
        """Train what is missing; folder -> last line of the log, of runs that failed."""
        missing = {one.planned.folder: one.planned for one in self.status() if not one.trained}

        def needed(job: Job) -> bool:
            planned = missing[job.name]
            return step_of(self.plan.run(planned)) != planned.steps

        training = [self._training(run) for run in missing.values()]
        return self._run("trained", training, self.options.at_once, needed)

    def _run(
        self, verb: str, todo: list[Job], at_once: int, needed: Callable[[Job], bool]
    ) -> dict[str, str]:
        """Run programs; the name and the last line of the log, of those that failed."""
        observer = StudyProgress(verb, self, len(todo))
        done = jobs.run(todo, at_once, self.plan.study.threads, observer, needed)
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

    def judge(self, quiet: bool, at_once: int) -> dict[str, str]:
        """What is missing of the kinds that need a quiet machine, or of the others, for the runs
        that tables show; dealt out to as many programs as may run at once."""
        asked = self.plan.study.measurements()
        kinds = sorted(kind for kind in asked if find_measure(kind).quiet_machine == quiet)
        shown = {run.planned.folder for runs in self.plan.results.shown.values() for run in runs}
        status = [one for one in self.status() if one.planned.folder in shown]
        lacking = [one.planned for one in status if {*kinds} & {*one.unjudged}]
        hands = [lacking[n::at_once] for n in range(at_once)]
        todo = [self._judging(hand, kinds) for hand in hands if hand]
        return self._run("judged", todo, at_once, lambda job: True)

    def _judging(self, runs: list[PlannedRun], kinds: list[str]) -> Job:
        first = runs[0].folder
        name = f"{', '.join(kinds)} of {len(runs)} runs from {first.removeprefix('runs/')} on"
        words = [str(self.plan.folder), ",".join(kinds), *(run.folder for run in runs)]
        command = (sys.executable, "-m", "amor.experiment.judging", *words)
        return Job(name, command, self._log(f"judged/{first}"))

    def _log(self, name: str) -> Path:
        return self.plan.folder / LOGS / f"{name.replace('/', '-')}.log"
