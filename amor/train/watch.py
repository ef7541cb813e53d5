"""Who is told what happens in a run: a metrics file always, plain lines for people, and whatever else is hung on.

An observer is any object with these methods; `Observer` has them all and does nothing.
"""

import sys
from typing import Any, TextIO

from amor.run import Run


class Observer:
    """The moments of a run. Override what is of interest; everything is a plain dict, ready for JSON."""

    def on_start(self, about: dict[str, Any]) -> None:
        """Before the first step: recipe, parameters, groups, step to start from, steps to go, folder."""

    def on_step(self, metrics: dict[str, Any]) -> None:
        """After every optimiser step: a line of metrics.jsonl."""

    def on_eval(self, metrics: dict[str, Any]) -> None:
        """After an evaluation: {"step", "valid": {"nll", "perplexity", "tokens", "fire"}, "timing"}."""

    def on_checkpoint(self, about: dict[str, Any]) -> None:
        """After a checkpoint is complete: {"step", "folder", "seconds"}."""

    def on_event(self, about: dict[str, Any]) -> None:
        """Anything out of the ordinary: {"event", "message", ...}."""

    def on_end(self, summary: dict[str, Any]) -> None:
        """The run is over, or stopped."""


class Record(Observer):
    """Writes metrics.jsonl and events.jsonl."""

    def __init__(self, run: Run):
        self.run = run

    def on_step(self, metrics: dict[str, Any]) -> None:
        self.run.measured(metrics)

    on_eval = on_step

    def on_event(self, about: dict[str, Any]) -> None:
        self.run.happened(**{"what" if key == "event" else key: value for key, value in about.items()})


class Lines(Observer):
    """Plain lines, for a terminal or a log file."""

    def __init__(self, every: int = 10, file: TextIO | None = None):
        self.every, self.file = every, file
        self.steps = 0

    def say(self, text: str) -> None:
        print(text, file=self.file or sys.stdout, flush=True)

    def on_start(self, about: dict[str, Any]) -> None:
        self.steps = about["steps"]
        self.say(
            f"{about['model']}: {about['parameters']:,} parameters, {about['steps']:,} steps of {about['step_tokens']:,} tokens"
        )
        for line in about["groups"]:
            self.say(f"  {line}")
        self.say(f"  {about['where']}; run directory {about['folder']}")

    def on_step(self, metrics: dict[str, Any]) -> None:
        step = metrics["step"]
        if step % self.every and step not in (1, self.steps):
            return
        fires = " ".join(f"{block['fire']:.2f}" for block in metrics.get("blocks", ()))
        self.say(
            f"step {step:>6}/{self.steps}  loss {metrics['loss']:.4f}  lr {metrics['lr']:.2e}  norm {metrics['grad_norm']:.2f}"
            f"  {metrics['timing']['tokens_per_second']:,.0f} tok/s" + (f"  fire {fires}" if fires else "")
        )

    def on_eval(self, metrics: dict[str, Any]) -> None:
        valid = metrics["valid"]
        words = "is not finite" if valid["nll"] is None else f"{valid['nll']:.4f}, perplexity {valid['perplexity']:.2f}"
        self.say(f"step {metrics['step']:>6}  valid nll {words}")

    def on_checkpoint(self, about: dict[str, Any]) -> None:
        self.say(f"step {about['step']:>6}  checkpoint {about['folder']} ({about['seconds']:.1f} s)")

    def on_event(self, about: dict[str, Any]) -> None:
        self.say(about["message"])
