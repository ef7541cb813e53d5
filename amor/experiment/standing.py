"""Where a study stands: how far each run is trained and what of it is judged, and how long the rest will take."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

import torch

from amor import typed
from amor.experiment.judging import file_of, missing
from amor.experiment.plan import Plan
from amor.experiment.subject import Subject, step_of
from amor.models.build import build
from amor.records.run import Step
from amor.records.study import Judgement, Planned
from amor.study.results import Results, chosen
from amor.train.predict import REACHED, train_flops


@dataclass(frozen=True)
class Standing:
    """One run."""

    planned: Planned
    step: int  # of its newest checkpoint
    unjudged: tuple[str, ...]  # kinds that are asked for and missing, of a run that is trained

    @property
    def trained(self) -> bool:
        return self.step == self.planned.steps


def standing(plan: Plan, planned: Planned) -> Standing:
    run = plan.run(planned)
    step = step_of(run)
    if step != planned.steps:
        return Standing(planned, step, ())
    return Standing(planned, step, tuple(missing(Subject(run, plan.study.threads, plan.ledger.data), plan.study.judge)))


@dataclass(frozen=True)
class Left:
    """Seconds: of training, judging from those that were judged, and measuring; None: nothing is known of it yet."""

    train: float
    judge: float | None

    @property
    def seconds(self) -> float:
        return self.train + (self.judge or 0.0)


class Clock:
    """How long runs take, learned from those that ran, else from their work and the rate of matrix products."""

    def __init__(self, plan: Plan, flops: Callable[[], float]):
        """flops: FLOP/s of this machine's matrix products, measured where no run tells."""
        self.plan, self.flops = plan, flops
        self.ran: dict[str, float] = {}  # seconds of a step, by run
        self.works: dict[str, float] = {}  # FLOPs of a step, by row

    def left(self, runs: Iterable[Standing], at_once: int) -> Left:
        runs = list(runs)
        self.listen(runs)
        each = [(one.planned.steps - one.step) * self.a_step(one.planned) for one in runs if not one.trained]
        return Left(max(sum(each) / at_once, max(each, default=0.0)), self._judging(runs, at_once))

    def listen(self, runs: Iterable[Standing]) -> None:
        """Take in the steps of runs that have begun; of a finished one once."""
        for one in runs:
            if one.trained and one.planned.folder in self.ran:
                continue
            taken = [line.timing.seconds for line in self.plan.run(one.planned).lines() if isinstance(line, Step)]
            if taken:
                self.ran[one.planned.folder] = statistics.mean(taken[1:] or taken)  # the first one builds kernels

    def a_step(self, planned: Planned) -> float:
        """Seconds of a step: its own, of its row's other runs, or by its work at the rate that all have reached."""
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
        return "from steps that ran" if self.ran else f"at {REACHED:.0%} of the rate of matrix products here"

    def work(self, planned: Planned) -> float:
        """FLOPs of a step; recipes that differ in the seed alone take as many."""
        recipe = self.plan.recipe(planned)
        if planned.row not in self.works:
            self.works[planned.row] = train_flops(build(recipe.config(), device="meta"), recipe.context) * recipe.step_tokens
        return self.works[planned.row]

    def _shown(self) -> dict[str, float | None]:
        """Row -> the learning rate that is judged: the best one so far, or before there is one any."""
        if not self.plan.study.lr:
            return {}
        best = chosen(Results(self.plan.ledger, self.plan.folder).runs)
        return {row: best.get(row, self.plan.study.lr[0]) for row in self.plan.ledger.rows}

    def _judging(self, runs: list[Standing], at_once: int) -> float | None:
        """From judgements that were made: the mean of each kind, of runs that are to come too; of each row one learning rate."""
        shown = self._shown()
        known: dict[str, list[float]] = {}
        lacking: list[str] = []
        for one in runs:
            for kind in self.plan.study.judge.asked():
                path = file_of(self.plan.run(one.planned), kind)
                if one.trained and kind not in one.unjudged:
                    known.setdefault(kind, []).extend([typed.read(Judgement, path).seconds] if path.is_file() else [])
                elif one.planned.lr == shown.get(one.planned.row):
                    lacking.append(kind)
        if not lacking:
            return 0.0
        if any(not known.get(kind) for kind in lacking):
            return None
        return sum(statistics.mean(known[kind]) for kind in lacking) / at_once
