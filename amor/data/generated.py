"""The batches of a task, made on demand: a function of the seed, the step and the row alone."""

import hashlib
import json

from amor.data.loader import BatchSource, Windows
from amor.data.tasks.base import Task

FORM = 1  # of the rows: raised where a task makes others than it did


class Generated(BatchSource):
    """The global batches of a run on a task."""

    def __init__(self, task: Task, batch: int, seed: int, stream: str = "train") -> None:
        """stream: one of chance.STREAMS."""
        self.task, self.batch, self.seed, self.stream = task, batch, seed, stream
        self.fixed = f"task {task.kind}, seed {seed} and batch {batch}"

    @property
    def fingerprint(self) -> str:
        task = json.dumps(self.task.tree, sort_keys=True)
        text = f"{FORM} {task} seed {self.seed} batch {self.batch} {self.stream}"
        return hashlib.sha256(text.encode()).hexdigest()

    def text(
        self, step: int, first: int = 0, last: int | None = None, end_of_text: int | None = None
    ) -> Windows:
        """Windows with the questions marked. A row is one document, so end_of_text is not used."""
        last = self._last(step, first, last)
        return self.task.rows(self.seed, self.stream, step, first, last)
