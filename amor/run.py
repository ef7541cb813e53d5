"""The run directory: what was run, where, what it measured step by step, and its checkpoints.

RUN/config.json            the recipe as run
RUN/machine.json           what it ran on
RUN/metrics.jsonl          a line a step, and a line an evaluation; a function of the recipe but for "timing"
RUN/events.jsonl           what happened to the run: started, resumed, stopped, a damaged checkpoint, a spike
RUN/checkpoints/step-...   model folders with the state of training beside the weights
RUN/latest, RUN/best       links to two of them, of which amor.load("RUN") opens the first
RUN/findings.json          what its newest model shows on held-out text: amor/judge/findings.py
RUN/failures/              batches that gave numbers that are not finite
"""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from amor.errors import AmorError
from amor.files import replace_file


class Run:
    """A run directory; nothing is written until something is said."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.config, self.machine = self.folder / "config.json", self.folder / "machine.json"
        self.metrics, self.events = self.folder / "metrics.jsonl", self.folder / "events.jsonl"
        self.findings = self.folder / "findings.json"
        self.checkpoints, self.failures = self.folder / "checkpoints", self.folder / "failures"

    def make(self) -> None:
        self.checkpoints.mkdir(parents=True, exist_ok=True)

    @property
    def used(self) -> bool:
        """Something was trained here before."""
        return self.config.is_file()

    def write(self, path: Path, tree: Any) -> None:
        replace_file(path, json.dumps(tree, indent=2) + "\n")

    def read_config(self) -> dict[str, Any]:
        try:
            return json.loads(self.config.read_text())
        except (OSError, json.JSONDecodeError) as error:
            raise AmorError(f"{self.folder} is not a run: {self.config.name} cannot be read ({error})") from error

    def measured(self, line: dict[str, Any]) -> None:
        _append(self.metrics, line)

    def happened(self, what: str, **more: Any) -> None:
        _append(self.events, {"event": what, "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), **more})

    def lines(self) -> Iterator[dict[str, Any]]:
        """The metrics written so far; a line cut short by a kill ends them."""
        if not self.metrics.is_file():
            return
        for line in self.metrics.read_text().splitlines():
            try:
                yield json.loads(line)
            except json.JSONDecodeError:
                return

    def rewind(self, step: int) -> None:
        """Forget what was measured after a step: it will be measured again."""
        if self.metrics.is_file():
            replace_file(self.metrics, "".join(json.dumps(line) + "\n" for line in self.lines() if line["step"] <= step))


def _append(path: Path, line: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(line, allow_nan=False) + "\n")
