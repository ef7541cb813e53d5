"""The status of a study: how far each run is trained, what of it is measured, and how long the rest
will take."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

import torch

from amor import typed
from amor.experiment.judging import file_of, missing
from amor.experiment.plan import StudyPlan
from amor.experiment.subject import FinishedRun, step_of
from amor.models.build import build
from amor.records.run import Step
from amor.study.definition import Measurement, PlannedRun
from amor.study.results import best_learning_rates
from amor.train.predict import REACHED, train_flops


@dataclass(frozen=True)
class RunStatus:
    """One run."""

    planned: PlannedRun
    step: int  # of its newest checkpoint
    unjudged: tuple[str, ...]  # kinds that are asked for and missing, of a run that is trained

    @property
    def trained(self) -> bool:
        """Whether the newest checkpoint is that of the last step."""
        return self.step == self.planned.steps


def run_status(plan: StudyPlan, planned: PlannedRun) -> RunStatus:
    """How far one run is trained and measured."""
    run = plan.run(planned)
    step = step_of(run)
    if step != planned.steps:
        return RunStatus(planned, step, ())
    subject = FinishedRun(run, plan.study.threads, plan.ledger.data)
    return RunStatus(planned, step, tuple(missing(subject, plan.study)))


@dataclass(frozen=True)
class TimeLeft:
    """Seconds to go; judge is None where no run has been measured yet."""

    train: float
    judge: float | None

    @property
    def seconds(self) -> float:
        """Training and, as far as it is known, measuring."""
        return self.train + (self.judge or 0.0)


class Estimator:
    """Estimates how long runs take: from those that ran, else from their FLOPs and the rate of
    matrix products."""

    def __init__(self, plan: StudyPlan, flops: Callable[[], float]):
        """flops: FLOP/s of this machine's matrix products, measured where no run tells."""
        self.plan, self.flops = plan, flops
        self.ran: dict[str, float] = {}  # seconds of a step, by run
        self.works: dict[str, float] = {}  # FLOPs of a step, by row

    def left(self, runs: Iterable[RunStatus], at_once: int) -> TimeLeft:
        """Seconds to go with `at_once` programs at a time."""
        runs = list(runs)
        self.update(runs)
        going = [one for one in runs if not one.trained]
        each = [(one.planned.steps - one.step) * self.step_seconds(one.planned) for one in going]
        train = max(sum(each) / at_once, max(each, default=0.0))
        return TimeLeft(train, self._judging(runs, at_once))

    def update(self, runs: Iterable[RunStatus]) -> None:
        """Read the step times of runs that have begun; of a finished one once."""
        for one in runs:
            if one.trained and one.planned.folder in self.ran:
                continue
            lines = self.plan.run(one.planned).lines()
            taken = [line.timing.seconds for line in lines if isinstance(line, Step)]
            if taken:
                # the first one builds kernels
                self.ran[one.planned.folder] = statistics.mean(taken[1:] or taken)

    def step_seconds(self, planned: PlannedRun) -> float:
        """Seconds of a step: its own, of its row's other runs, or by its work at the rate that all
        have reached."""
        if planned.folder in self.ran:
            return self.ran[planned.folder]
        folders = {one.folder: one for one in self.plan.runs}
        same = [taken for folder, taken in self.ran.items() if folders[folder].row == planned.row]
        if same:
            return statistics.mean(same)
        reached = [self.work(folders[folder]) / taken for folder, taken in self.ran.items()]
        return self.work(planned) / (statistics.mean(reached) if reached else self.guess)

    @cached_property
    def guess(self) -> float:
        """FLOP/s that a run will reach, with its threads."""
        before = torch.get_num_threads()
        torch.set_num_threads(self.plan.study.threads)
        try:
            return self.flops() * REACHED
        finally:
            torch.set_num_threads(before)

    @property
    def source(self) -> str:
        """What the estimate rests on, in words."""
        guess = f"at {REACHED:.0%} of the rate of matrix products here"
        return "from steps that ran" if self.ran else guess

    def work(self, planned: PlannedRun) -> float:
        """FLOPs of a step; recipes that differ in the seed alone take as many."""
        if planned.row not in self.works:
            recipe = self.plan.recipe(planned)
            per_token = train_flops(build(recipe.config(), device="meta"), recipe.context)
            self.works[planned.row] = per_token * recipe.step_tokens
        return self.works[planned.row]

    def _judging(self, runs: list[RunStatus], at_once: int) -> float | None:
        """From judgements that were made: the mean of each kind, of runs that are to come too; of
        each row one learning rate: the best one so far, or before there is one the first."""
        rates = self.plan.study.lr
        best = best_learning_rates(self.plan.results.runs) if rates else {}
        known: dict[str, list[float]] = {}
        lacking: list[str] = []
        for one in runs:
            for kind in self.plan.study.measurements():
                path = file_of(self.plan.run(one.planned), kind)
                if one.trained and kind not in one.unjudged:
                    if path.is_file():
                        took = typed.read(Measurement, path).seconds
                        known.setdefault(kind, []).append(took)
                elif not rates or one.planned.lr == best.get(one.planned.row, rates[0]):
                    lacking.append(kind)
        if not lacking:
            return 0.0
        if any(not known.get(kind) for kind in lacking):
            return None
        return sum(statistics.mean(known[kind]) for kind in lacking) / at_once
