"""Observers of a run: the metrics file, and the contract of whatever else is passed in.

Rank 0 calls every observer at each moment of a run. A subclass of `Observer` overrides the moments
it wants.
"""

from dataclasses import dataclass

from amor.records import Record
from amor.records.run import Evaluated, Event, Judged, Line, Step, Valid
from amor.run import Run
from amor.train.recipe import Recipe


@dataclass(frozen=True)
class RunStarted:
    """A run before its first step."""

    recipe: Recipe
    model: str  # name of the config
    parameters: int  # how many numbers the model has, frozen ones included
    groups: list[str]  # one line of text per parameter group of the optimiser
    step: int  # steps already taken: 0, or that of the checkpoint it resumes from
    steps: int  # the step at which the run ends
    folder: str  # the run directory
    where: str  # precision, processes and device, as text


@dataclass(frozen=True)
class CheckpointSaved:
    """A complete checkpoint."""

    step: int
    folder: str
    seconds: float  # gathering, writing and deleting old ones


class RunEnded(Record, frozen=True, omit_defaults=True):
    """A run that is finished, or was stopped by a signal."""

    done: bool  # all of its steps were taken
    step: int
    folder: str
    exit: int | None = None  # if a signal stopped it: the exit code a shell expects
    stopped_by: str | None = None  # name of that signal
    valid: Judged | None = None  # the last evaluation


class Observer:
    """The moments of a run; each does nothing until it is overridden."""

    def on_start(self, started: RunStarted) -> None:
        """Before the first step."""

    def on_step(self, metrics: Step) -> None:
        """After every optimiser step: a line of metrics.jsonl."""

    def on_eval(self, metrics: Evaluated) -> None:
        """After an evaluation: a line of metrics.jsonl."""

    def on_checkpoint(self, saved: CheckpointSaved) -> None:
        """After a checkpoint is complete."""

    def on_event(self, event: Event) -> None:
        """Anything out of the ordinary: a line of events.jsonl."""

    def on_end(self, ended: RunEnded) -> None:
        """The run is finished, or stopped."""


class MetricsWriter(Observer):
    """Writes metrics.jsonl and events.jsonl."""

    def __init__(self, run: Run):
        self.run = run

    def on_step(self, metrics: Line) -> None:
        self.run.measured(metrics)

    on_eval = on_step

    def on_event(self, event: Event) -> None:
        self.run.happened(event)


def answers(valid: Valid) -> str:
    """Of a generated task: accuracy on its questions and how often gates fired there, as the end of
    a line.
    """
    answered = valid.answered
    if answered is None:
        return ""
    text = f", right {100 * answered.accuracy:.1f} %"
    if answered.fire:
        rates = "/".join(f"{100 * rate:.0f}" for rate in answered.fire)
        text += f", fires on {rates} % of the questions"
    return text


def number(value: float | None, spec: str = ".3f") -> str:
    """A number by a format spec; "-" for None (a gate without a threshold, a loss that is not
    finite).
    """
    return "-" if value is None else format(value, spec)
