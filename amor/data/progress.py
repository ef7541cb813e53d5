"""Progress of a long piece of work: a bar on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any

LINE_EVERY = 15.0  # seconds between plain lines; work that ends sooner prints none


class Progress:
    """Counts towards a total (None where it is not known) and says so on stderr, so that stdout
    stays for results.
    """

    def __init__(self, words: str, total: int | None, unit: str) -> None:
        self.words, self.total, self.unit = words, total, unit
        self.done, self.note = 0, ""
        self.began = self.said = time.monotonic()
        self._bar: Any = None

    def __enter__(self) -> Progress:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.fields[words]}"),
                TimeRemainingColumn(),
            )
            self._bar = Bar(*columns, console=Console(stderr=True), transient=True)
            self._bar.add_task(self.words, total=self.total, words="")
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def add(self, count: int) -> None:
        self.to(self.done + count)

    def to(self, done: int, note: str | None = None) -> None:
        self.done = done
        self.note = self.note if note is None else note
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=self.done, words=self._state())
        elif time.monotonic() - self.said >= LINE_EVERY:
            self.said = time.monotonic()
            print(f"{self.words}: {self._state()}", file=sys.stderr, flush=True)

    def _state(self) -> str:
        share = f" ({100 * self.done / self.total:.0f} %)" if self.total else ""
        rate = self.done / max(time.monotonic() - self.began, 1e-9)
        counts = f"{short(self.done)}{self.unit}{share}, {short(rate)}{self.unit}/s"
        if self.total and self.done and self._bar is None:  # a bar has a column for it
            left = int((self.total - self.done) / rate)
            counts += f", {left // 3600}:{left // 60 % 60:02}:{left % 60:02} to go"
        return f"{counts}, {self.note}" if self.note else counts


def short(number: float) -> str:
    """1234567 -> '1.2 M': three figures are enough for a moving number."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.1f} {letter}"
    return f"{number:.0f} "
