"""Progress of long work: a rich bar on a terminal, a plain line now and then elsewhere.

`Progress` counts, `Countdown` estimates the time to go, `Every` says when a line is due. They print
to stderr, so that stdout is left for results.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as RichProgress

LINE_EVERY = 15.0  # seconds between plain lines; work that ends sooner prints none


class Countdown:
    """Seconds that work towards a total has taken, and has left."""

    def __init__(self, total: int | None, done: int = 0):
        """total: None where it is not known; done: at the start, for work that is resumed."""
        self.total, self.first, self.done = total, done, done
        self.began = time.monotonic()
        self._warm: tuple[float, int] | None = None  # moment and count of the first update

    def to(self, done: int) -> None:
        """Set how much is done."""
        self.done = done
        if self._warm is None:
            self._warm = time.monotonic(), done

    @property
    def elapsed(self) -> float:
        """Seconds since the start of this process's part of the work."""
        return time.monotonic() - self.began

    @property
    def to_go(self) -> float | None:
        """Seconds left, by the mean since the first update, which often compiles and allocates;
        None where nothing is done yet or the total is not known."""
        if self.total is None or self._warm is None:
            return None
        moment, count = self._warm
        if self.done > count:
            per_unit = (time.monotonic() - moment) / (self.done - count)
        else:
            per_unit = self.elapsed / max(self.done - self.first, 1)
        return per_unit * (self.total - self.done)


class Every:
    """A line that is due after so many seconds without one."""

    def __init__(self, seconds: float):
        self.seconds, self.last = seconds, time.monotonic()

    def due(self) -> bool:
        """Whether it is due; if so, the seconds count anew."""
        if time.monotonic() - self.last < self.seconds:
            return False
        self.restart()
        return True

    def restart(self) -> None:
        """Count the seconds from now on."""
        self.last = time.monotonic()


class Progress:
    """Counts towards a total and shows it, inside a `with`."""

    def __init__(self, title: str, total: int | None, unit: str):
        """total: None where it is not known; unit: of what is counted, e.g. "tokens" or "B"."""
        self.title, self.label, self.unit, self.note = title, title, unit, ""
        self.countdown, self.line = Countdown(total), Every(LINE_EVERY)
        self._bar: RichProgress | None = None

    def __enter__(self) -> Progress:
        if sys.stderr.isatty():
            from rich.console import Console

            self._bar = make_bar(Console(stderr=True), transient=True)
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def begin(self, part: str, total: int) -> None:
        """Count another part of the work from zero; its name follows the title."""
        self.label, self.countdown = f"{self.title}: {part}", Countdown(total)

    def add(self, count: int) -> None:
        """Count so many more."""
        self.to(self.countdown.done + count)

    def to(self, done: int, note: str | None = None) -> None:
        """Set how much is done. note: shown behind the numbers until another is given."""
        self.countdown.to(done)
        self.note = self.note if note is None else note
        if self._bar is not None:
            draw_bar(self._bar, self.label, self.countdown, self._state())
        elif self.line.due():
            print(f"{self.label}: {self._state()}", file=sys.stderr, flush=True)

    def _state(self) -> str:
        done, total = self.countdown.done, self.countdown.total
        rate, to_go = done / max(self.countdown.elapsed, 1e-9), self.countdown.to_go
        share = f" ({100 * done / total:.0f} %)" if total else ""
        parts = [f"{amount(done, self.unit)}{share}", f"{amount(rate, self.unit)}/s"]
        parts += [] if to_go is None else [f"{clock(to_go)} to go"]
        return ", ".join([*parts, *([self.note] if self.note else [])])


def make_bar(console: Console, transient: bool = False) -> RichProgress:
    """A bar as wide as the terminal, between a description and a text."""
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as RichProgress

    texts = [
        TextColumn(f"{{task.{key}}}", markup=False) for key in ("description", "fields[state]")
    ]
    columns = texts[0], BarColumn(bar_width=None), texts[1]
    return RichProgress(*columns, console=console, transient=transient, expand=True)


def draw_bar(bar: RichProgress, label: str, countdown: Countdown, state: str) -> None:
    """Set the only task of a bar."""
    total, done = countdown.total, countdown.done
    if not bar.task_ids:
        bar.add_task(label, total=total, state=state)
    bar.update(bar.task_ids[0], description=label, total=total, completed=done, state=state)


def amount(number: float, unit: str) -> str:
    """(1234567, "B") -> 1.2 MB: a moving number needs no more digits."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.1f} {letter}{'' if unit == 'B' else ' '}{unit}"
    return f"{number:.0f} {unit}"


def clock(seconds: float) -> str:
    """75 -> 1:15, 3700 -> 1:01:40."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
