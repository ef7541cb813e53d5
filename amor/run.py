"""The run directory: what was run, where, what it measured step by step, and its checkpoints.

RUN/config.json            the recipe as run
RUN/machine.json           what it ran on
RUN/metrics.jsonl          a line per step and evaluation; all but "timing" follows from the recipe
RUN/events.jsonl           started, resumed, stopped, a damaged checkpoint, a spike
RUN/checkpoints/step-...   model folders with the state of training beside the weights
RUN/latest, RUN/best       links to two of them, of which amor.load("RUN") opens the first
RUN/findings.json          what its newest model shows on held-out text: amor/judge/findings.py
RUN/recall.json            what the newest model of a task's run recalls: amor/judge/recall.py
RUN/failures/              batches that gave numbers that are not finite

Their contents are the types of amor/records/; config.json is a recipe (amor/train/recipe.py) with a
version.
"""

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from amor import typed
from amor.errors import AmorError
from amor.files import replace_file
from amor.records.findings import Findings
from amor.records.recall import Recall
from amor.records.run import Event, Line, Machine, RecipeSummary, kind_of_line

VERSION = 1  # of config.json


class Run:
    """A run directory; nothing is written before the first record."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.config, self.machine = self.folder / "config.json", self.folder / "machine.json"
        self.metrics, self.events = self.folder / "metrics.jsonl", self.folder / "events.jsonl"
        self.findings, self.recall = self.folder / "findings.json", self.folder / "recall.json"
        self.checkpoints, self.failures = self.folder / "checkpoints", self.folder / "failures"

    def make(self) -> None:
        """Make the folder."""
        self.checkpoints.mkdir(parents=True, exist_ok=True)

    @property
    def used(self) -> bool:
        """Whether something was trained here before."""
        return self.config.is_file()

    def write(self, path: Path, thing: Any) -> None:
        """Write a typed value or a tree of plain ones as JSON, atomically."""
        replace_file(path, typed.text(thing))

    def write_config(self, recipe: Mapping[str, Any]) -> None:
        """Write config.json: the recipe as plain values."""
        self.write(self.config, {"version": VERSION, **recipe})

    def read_config(self) -> dict[str, Any]:
        """The recipe as plain values."""
        try:
            tree = typed.read(dict[str, Any], self.config)
        except AmorError as error:
            raise AmorError(f"{self.folder} is not a run: {error}") from None
        version = tree.pop("version", VERSION)
        if version != VERSION:
            raise AmorError(
                f"{self.config}: of version {version!r}; this amor reads version {VERSION}"
            )
        return tree

    def recipe(self) -> RecipeSummary:
        """The part of the recipe that a summary of a run shows."""
        return typed.convert(RecipeSummary, self.read_config(), str(self.config))

    def read_machine(self) -> Machine:
        """machine.json; empty where it is missing."""
        return typed.read(Machine, self.machine) if self.machine.is_file() else Machine()

    def read_findings(self) -> Findings | None:
        """findings.json; None where it is missing."""
        return typed.read(Findings, self.findings) if self.findings.is_file() else None

    def read_recall(self) -> Recall | None:
        """recall.json; None where it is missing."""
        return typed.read(Recall, self.recall) if self.recall.is_file() else None

    def measured(self, line: Line) -> None:
        """Append a line to metrics.jsonl."""
        _append(self.metrics, line)

    def happened(self, event: Event) -> None:
        """Append an event to events.jsonl, with the time."""
        _append(
            self.events, msgspec.structs.replace(event, time=time.strftime("%Y-%m-%dT%H:%M:%S%z"))
        )

    def lines(self) -> Iterator[Line]:
        """The metrics written so far; a line cut short by a kill ends them."""
        if self.metrics.is_file():
            yield from typed.read_lines(kind_of_line, self.metrics)

    def read_events(self) -> Iterator[Event]:
        """The events written so far; a line cut short by a kill ends them."""
        if self.events.is_file():
            yield from typed.read_lines(Event, self.events)

    def rewind(self, step: int) -> None:
        """Forget what was measured after a step: it will be measured again."""
        if self.metrics.is_file():
            replace_file(
                self.metrics,
                "".join(typed.line(line) for line in self.lines() if line.step <= step),
            )


def _append(path: Path, line: Line | Event) -> None:
    """Append a line; a last line that a kill has cut off is removed first."""
    with path.open("ab+") as file:
        if file.seek(0, 2) and file.seek(-1, 2) >= 0 and file.read(1) != b"\n":
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)
        file.write(typed.line(line).encode())
