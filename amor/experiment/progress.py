"""What a study says while it runs: what began, what is done, how long is to go."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from amor.experiment.jobs import Finished, Job, Running, Waited
from amor.train.display import clock

if TYPE_CHECKING:
    from amor.experiment.runner import Runner

EVERY = 60.0  # seconds between two lines, where nothing happens


class Progress(Waited):
    def __init__(self, verb: str, runner: Runner, jobs: int):
        self.verb, self.runner, self.jobs = verb, runner, jobs
        self.done = 0
        self.told = time.monotonic()

    def began(self, job: Job) -> None:
        self.runner.say(f"begun: {job.name}")

    def ended(self, finished: Finished) -> None:
        self.done += 1
        if finished.code:
            self.runner.say(f"FAILED: {finished.job.name}: {finished.said} (all of it: {finished.job.log})")
        took = f"{self.verb}: {finished.job.name} in {clock(finished.seconds)}" if not finished.code else "going on"
        self.runner.say(f"{took}; {self.done} of {self.jobs}{self._to_go()}")
        self.told = time.monotonic()

    def turn(self, running: list[Running], waiting: list[Job]) -> None:
        if time.monotonic() - self.told < EVERY:
            return
        self.told = time.monotonic()
        steps = {one.planned.folder: f"step {one.step:,}/{one.planned.steps:,}" for one in self.runner.status()}
        names = ", ".join(f"{one.job.name} {steps.get(one.job.name, '')}".strip() for one in running)
        self.runner.say(f"{self.verb} {self.done} of {self.jobs}; at it: {names or 'another program'}{self._to_go()}")

    def _to_go(self) -> str:
        left = self.runner.clock.left(self.runner.status(), self.runner.options.at_once)
        judging = "" if left.judge is not None else ", judging apart"
        return f"; {clock(left.seconds)} to go{judging}"
