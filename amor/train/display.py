"""Progress of a run: a live display on a terminal, the same as plain lines anywhere else.

Loss, tokens per second, share of the machine's peak rate, time left; per block how often it fires
and at which threshold.
"""

import sys
from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, TextIO

from amor.progress import Countdown, clock, draw_bar, make_bar
from amor.records.run import Evaluated, Event, GateLine, Step
from amor.train.recipe import Recipe
from amor.train.watch import CheckpointSaved, Observer, RunEnded, RunStarted, answers, number

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

RECENT = 20  # steps over which speed is averaged
BARS = "▁▂▃▄▅▆▇█"


class Pace(Countdown):
    """Speed of a run, the share of the machine's peak rate that this is, and the time left,
    evaluations and checkpoints included."""

    def __init__(self, started: RunStarted, ceiling: float | None):
        """ceiling: FLOP/s of the machine on a large matrix product; None if it was not measured."""
        super().__init__(started.steps, started.step)
        self.step_tokens = started.recipe.step_tokens
        self.ceiling = ceiling
        self.flops = flops_per_token(started.recipe) if ceiling else 0.0
        self.recent: deque[float] = deque(maxlen=RECENT)

    def took(self, step: int, seconds: float) -> None:
        """Take in a step and its duration."""
        self.to(step)
        self.recent.append(seconds)

    @property
    def tokens_per_second(self) -> float:
        """Mean of the last RECENT steps."""
        return self.step_tokens * len(self.recent) / max(sum(self.recent), 1e-9)

    @property
    def share(self) -> float | None:
        """Fraction of the ceiling; None if it was not measured, or while the machine was so busy
        that the run is faster."""
        share = self.tokens_per_second * self.flops / self.ceiling if self.ceiling else None
        return share if share is not None and share <= 1 else None

    @property
    def left(self) -> str:
        """The time to go, in words."""
        return "first step" if self.to_go is None else f"{clock(self.to_go)} to go"


def flops_per_token(recipe: Recipe) -> float:
    """FLOPs of matrix products per trained token."""
    from amor.models.build import build
    from amor.train.predict import train_flops

    return train_flops(build(recipe.config(), device="meta"), recipe.context)


def gates(blocks: Sequence[GateLine]) -> str:
    """Firing rates and thresholds of the blocks, as the end of a line."""
    if not blocks:
        return ""
    rates = "/".join(f"{100 * b.fire:.0f}" for b in blocks)
    levels = "/".join(number(b.tau) for b in blocks)
    return f"  fires {rates} %, thresholds {levels}"


class Lines(Observer):
    """Lines of text, for a log file: one every few steps, and one per evaluation and checkpoint."""

    def __init__(self, ceiling: float | None = None, every: int = 10, file: TextIO | None = None):
        """ceiling: as of Pace. every: steps between two lines. file: None is standard output."""
        self.ceiling, self.every, self.file = ceiling, every, file

    def print(self, text: str) -> None:
        """Print a line at once, also into a pipe."""
        print(text, file=self.file or sys.stdout, flush=True)

    def on_start(self, started: RunStarted) -> None:
        self.pace = Pace(started, self.ceiling)
        tokens = started.recipe.step_tokens
        size = f"{started.parameters:,} parameters, {started.steps:,} steps of {tokens:,} tokens"
        self.print(f"{started.model}: {size}")
        for line in started.groups:
            self.print(f"  {line}")
        self.print(f"  {started.where}; run directory {started.folder}")

    def on_step(self, metrics: Step) -> None:
        step, pace = metrics.step, self.pace
        pace.took(step, metrics.timing.seconds)
        if step % self.every and step not in (pace.first + 1, pace.total):
            return
        share = "" if pace.share is None else f" ({pace.share:.0%} of the ceiling)"
        loss, norm = number(metrics.loss, ".4f"), number(metrics.grad_norm, ".2f")
        self.print(
            f"step {step:>6}/{pace.total}  loss {loss}  lr {metrics.lr:.2e}  norm {norm}"
            f"  {pace.tokens_per_second:,.0f} tokens/s{share}  {pace.left}" + gates(metrics.blocks)
        )

    def on_eval(self, metrics: Evaluated) -> None:
        valid, text = metrics.valid, "is not finite"
        if valid.nll is not None:
            text = f"{valid.nll:.4f}, perplexity {number(valid.perplexity, '.2f')}"
        self.print(f"step {metrics.step:>6}  valid nll {text}{answers(valid)}")

    def on_checkpoint(self, saved: CheckpointSaved) -> None:
        self.print(f"step {saved.step:>6}  checkpoint {saved.folder} ({saved.seconds:.1f} s)")

    def on_event(self, event: Event) -> None:
        self.print(event.message)

    def close(self) -> None:
        """Nothing to release."""


class Display(Observer):
    """A live display that is redrawn in place; events are printed above it and stay."""

    def __init__(self, ceiling: float | None = None, console: "Console | None" = None):
        from rich.console import Console
        from rich.live import Live

        self.ceiling, self.console = ceiling, console or Console()
        self.live = Live(console=self.console, refresh_per_second=4, get_renderable=self.render)
        self.bar = make_bar(self.console)
        self.losses: list[float] = []
        self.metrics: Step | None = None
        self.valid = self.saved = "-"

    def on_start(self, started: RunStarted) -> None:
        self.started, self.pace = started, Pace(started, self.ceiling)
        self.live.start()

    def on_step(self, metrics: Step) -> None:
        self.pace.took(metrics.step, metrics.timing.seconds)
        if metrics.loss is not None:
            self.losses.append(metrics.loss)
        self.metrics = metrics

    def on_eval(self, metrics: Evaluated) -> None:
        valid = metrics.valid
        nll, perplexity = number(valid.nll, ".4f"), number(valid.perplexity, ".1f")
        self.valid = f"{nll}, perplexity {perplexity}{answers(valid)} at step {metrics.step:,}"

    def on_checkpoint(self, saved: CheckpointSaved) -> None:
        self.saved = f"step {saved.step:,}"

    def on_event(self, event: Event) -> None:
        self.console.print(event.message, style="yellow", highlight=False, markup=False)

    def on_end(self, ended: RunEnded) -> None:
        self.close()

    def close(self) -> None:
        """Release the terminal, also after an error."""
        self.live.stop()

    def render(self) -> "RenderableType":
        """The whole display, as it is drawn again several times per second."""
        from rich.console import Group
        from rich.text import Text

        if not hasattr(self, "pace"):
            return Text()
        parts: list[RenderableType] = [self.progress(), self.numbers()]
        if self.metrics and self.metrics.blocks:
            parts.append(self.gates(self.metrics.blocks))
        return Group(*parts)

    def progress(self) -> "RenderableType":
        """The steps as a bar, with the time taken and to go."""
        pace = self.pace
        label = f"step {pace.done:,}/{self.started.steps:,}"
        draw_bar(self.bar, label, pace, f"{clock(pace.elapsed)}, {pace.left}")
        return self.bar.get_renderable()

    def numbers(self) -> "Table":
        """Model, loss, speed and optimiser, a row each."""
        from rich.table import Table

        started, pace, last = self.started, self.pace, self.metrics
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="dim", no_wrap=True)
        grid.add_column()
        grid.add_row(
            "model", f"{started.model}, {started.parameters:,} parameters, {started.where}"
        )
        if last:
            grid.add_row(
                "loss",
                f"[bold]{number(last.loss, '.4f')}[/] "
                f" [cyan]{bars(self.losses, self.console.width - 24)}[/]",
            )
            grid.add_row("valid", self.valid)
            share = "" if pace.share is None else f", {pace.share:.0%} of this machine's ceiling"
            grid.add_row("speed", f"{pace.tokens_per_second:,.0f} tokens/s{share}")
            grid.add_row(
                "optimiser",
                f"learning rate {last.lr:.2e}, gradient norm {number(last.grad_norm, '.2f')}",
            )
        grid.add_row("run", f"{started.folder}, checkpoint {self.saved}")
        return grid

    def gates(self, blocks: Sequence[GateLine]) -> "Table":
        """A row per block: how often it fires, its threshold, alpha and scores."""
        from rich import box
        from rich.table import Table

        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), title_justify="left")
        for name in ("block", "fires", "", "threshold", "alpha", "scores, 10-90 %"):
            table.add_column(name, justify="left" if name == "" else "right", no_wrap=True)
        for index, block in enumerate(blocks):
            filled = round(20 * block.fire)
            table.add_row(
                str(index),
                f"{block.fire:.1%}",
                f"[magenta]{'█' * filled}[/][dim]{'░' * (20 - filled)}[/]",
                number(block.tau),
                number(block.alpha),
                f"{number(block.score_10)} - {number(block.score_90)}",
            )
        return table


def bars(values: list[float], width: int) -> str:
    """The values as a row of bar characters, averaged to fit the width."""
    if len(values) < 2 or width < 2:
        return ""
    count = min(len(values), width, 60)
    edges = [round(i * len(values) / count) for i in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    return "".join(BARS[round((m - low) / max(high - low, 1e-12) * (len(BARS) - 1))] for m in means)


def for_people(ceiling: float | None = None) -> Display | Lines:
    """The live display on a terminal, plain lines otherwise."""
    return Display(ceiling) if sys.stdout.isatty() else Lines(ceiling)
