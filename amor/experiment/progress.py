"""Progress of a study in lines: what started, what is done, how long the rest will take."""

from __future__ import annotations

from typing import TYPE_CHECKING

from amor.experiment.jobs import FinishedJob, Job, JobObserver, RunningJob
from amor.progress import Every, clock

if TYPE_CHECKING:
    from amor.experiment.runner import Runner

EVERY = 60.0  # seconds between two lines, where nothing happens


class StudyProgress(JobObserver):
    """Prints what starts, what ends and the time to go, and a line per minute in between."""

    def __init__(self, verb: str, runner: Runner, jobs: int):
        self.verb, self.runner, self.jobs = verb, runner, jobs
        self.done = 0
        self.line = Every(EVERY)

    def on_start(self, job: Job) -> None:
        """Print what was started."""
        print(f"begun: {job.name}")

    def on_end(self, finished: FinishedJob) -> None:
        """Print how it ended, and the time to go."""
        self.done += 1
        name, took = finished.job.name, "going on"
        if finished.code:
            print(f"FAILED: {name}: {finished.last_line} (all of it: {finished.job.log})")
        else:
            took = f"{self.verb}: {name} in {clock(finished.seconds)}"
        print(f"{took}; {self.done} of {self.jobs}{self._to_go()}")
        self.line.restart()

    def on_tick(self, running: list[RunningJob], waiting: list[Job]) -> None:
        """Print a line per minute."""
        if not self.line.due():
            return
        status = {one.planned.folder: one for one in self.runner.status()}
        words = []
        for name in (job.job.name for job in running):
            one = status.get(name)
            words.append(f"{name} step {one.step:,}/{one.planned.steps:,}" if one else name)
        names = ", ".join(words) or "another program"
        print(f"{self.verb} {self.done} of {self.jobs}; at it: {names}{self._to_go()}")

    def _to_go(self) -> str:
        left = self.runner.clock.left(self.runner.status(), self.runner.options.at_once)
        judging = "" if left.judge is not None else ", judging apart"
        return f"; {clock(left.seconds)} to go{judging}"
