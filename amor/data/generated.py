"""The batches of a task, made as they are asked for: a function of the seed, the step and the row
alone.
"""

import hashlib
import json

import torch

from amor.data.loader import Windows
from amor.data.tasks.base import Task
from amor.errors import AmorError

FORM = 1  # of the rows: raised where a task makes others than it did


class Generated:
    """The global batches of a run of a task; `rows` hands out any part of any of them."""

    def __init__(self, task: Task, batch: int, seed: int, stream: str = "train") -> None:
        self.task, self.batch, self.seed, self.stream = task, batch, seed, stream

    @property
    def fingerprint(self) -> str:
        """Equal for two runs exactly when they see the same tokens at every step."""
        words = f"{FORM} {json.dumps(self.task.tree, sort_keys=True)} seed {self.seed} batch {self.batch} {self.stream}"
        return hashlib.sha256(words.encode()).hexdigest()

    def check(self, fingerprint: str) -> None:
        """Raise unless a run with this fingerprint would go on with the same rows."""
        if fingerprint != self.fingerprint:
            raise AmorError(
                f"the checkpoint was made with other data (fingerprint {fingerprint[:12]}, here "
                f"{self.fingerprint[:12]}): "
                f"task {self.task.kind}, seed {self.seed} and batch {self.batch} must be as "
                "they were; "
                "restore them or start a new run"
            )

    def rows(
        self, step: int, first: int = 0, last: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows first .. last - 1 of the global batch of a step: tokens [n, T] and their targets [n,
        T].
        """
        found = self.text(step, first, last)
        return found.tokens, found.targets

    def text(
        self, step: int, first: int = 0, last: int | None = None, end_of_text: int | None = None
    ) -> Windows:
        """The same with the questions marked. A row is one document, so nothing ends one."""
        last = self.batch if last is None else last
        if step < 0 or not 0 <= first <= last <= self.batch:
            raise IndexError(f"step {step}, rows {first}..{last} of a batch of {self.batch}")
        return self.task.rows(self.seed, self.stream, step, first, last)
