"""Who is told what happens in a run: a metrics file always, plain lines for people, and whatever else is hung on.

An observer is any object with these methods; `Observer` has them all and does nothing.
"""

import sys
from dataclasses import dataclass
from typing import TextIO

from amor import records
from amor.records.run import Evaluated, Event, Judged, Line, Step, Valid
from amor.run import Run
from amor.train.recipe import Recipe


@dataclass(frozen=True)
class Begun:
    """A run before its first step."""

    recipe: Recipe
    model: str
    parameters: int
    groups: list[str]  # of parameters, as the optimiser has them, in words
    step: int  # the run goes on from here
    steps: int  # and ends here
    folder: str
    where: str  # it is computed, in words


@dataclass(frozen=True)
class Saved:
    """A checkpoint that is complete."""

    step: int
    folder: str
    seconds: float


class Ended(records.Record, frozen=True, omit_defaults=True):
    """A run that is over, or was stopped."""

    done: bool  # all of its steps
    step: int
    folder: str
    exit: int | None = None  # of a run that was stopped: the code a shell expects
    stopped_by: str | None = None
    valid: Judged | None = None  # the last evaluation


class Observer:
    """The moments of a run. Override what is of interest."""

    def on_start(self, begun: Begun) -> None:
        """Before the first step."""

    def on_step(self, metrics: Step) -> None:
        """After every optimiser step: a line of metrics.jsonl."""

    def on_eval(self, metrics: Evaluated) -> None:
        """After an evaluation: a line of metrics.jsonl."""

    def on_checkpoint(self, saved: Saved) -> None:
        """After a checkpoint is complete."""

    def on_event(self, event: Event) -> None:
        """Anything out of the ordinary: a line of events.jsonl."""

    def on_end(self, ended: Ended) -> None:
        """The run is over, or stopped."""


class Record(Observer):
    """Writes metrics.jsonl and events.jsonl."""

    def __init__(self, run: Run):
        self.run = run

    def on_step(self, metrics: Line) -> None:
        self.run.measured(metrics)

    on_eval = on_step

    def on_event(self, event: Event) -> None:
        self.run.happened(event)


class Lines(Observer):
    """Plain lines, for a terminal or a log file."""

    def __init__(self, every: int = 10, file: TextIO | None = None):
        self.every, self.file = every, file
        self.steps = 0

    def say(self, text: str) -> None:
        print(text, file=self.file or sys.stdout, flush=True)

    def on_start(self, begun: Begun) -> None:
        self.steps = begun.steps
        tokens = begun.recipe.step_tokens
        self.say(f"{begun.model}: {begun.parameters:,} parameters, {begun.steps:,} steps of {tokens:,} tokens")
        for line in begun.groups:
            self.say(f"  {line}")
        self.say(f"  {begun.where}; run directory {begun.folder}")

    def on_step(self, metrics: Step) -> None:
        step = metrics.step
        if step % self.every and step not in (1, self.steps):
            return
        fires = " ".join(f"{block.fire:.2f}" for block in metrics.blocks)
        self.say(
            f"step {step:>6}/{self.steps}  {learned(metrics)}"
            f"  {metrics.timing.tokens_per_second:,.0f} tok/s" + (f"  fire {fires}" if fires else "")
        )

    def on_eval(self, metrics: Evaluated) -> None:
        valid = metrics.valid
        words = "is not finite" if valid.nll is None else f"{valid.nll:.4f}, perplexity {number(valid.perplexity, '.2f')}"
        self.say(f"step {metrics.step:>6}  valid nll {words}{answers(valid)}")

    def on_checkpoint(self, saved: Saved) -> None:
        self.say(f"step {saved.step:>6}  checkpoint {saved.folder} ({saved.seconds:.1f} s)")

    def on_event(self, event: Event) -> None:
        self.say(event.message)


def learned(metrics: Step) -> str:
    return f"loss {number(metrics.loss, '.4f')}  lr {metrics.lr:.2e}  norm {number(metrics.grad_norm, '.2f')}"


def answers(valid: Valid) -> str:
    """What of a task's questions was answered, and how often gates fired on them, as the end of a line."""
    found = valid.answered
    if found is None:
        return ""
    fires = f", fires on {'/'.join(f'{100 * rate:.0f}' for rate in found.fire)} % of the questions" if found.fire else ""
    return f", right {100 * found.accuracy:.1f} %{fires}"


def number(value: float | None, form: str = ".3f") -> str:
    """A gate may have no threshold, a loss may not be finite."""
    return "-" if value is None else format(value, form)
