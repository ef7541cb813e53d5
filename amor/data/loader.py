"""Batches: which tokens a training step sees, as a function of the seed and the step alone.

The stream is cut into windows of `context` tokens, each with the next token as its last target, so
every token but the first is a target once per epoch; what is left at the end, shorter than a
window, is not used. An epoch is a permutation of the windows (amor.data.order). Row r of step s is
place s * batch + r of the endless sequence of epochs: architecture, micro-batches and ranks have no
part in it, and there is no state to save but the step.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch

from amor.data.order import permuted
from amor.data.shards import Shards
from amor.errors import AmorError


@dataclass(frozen=True)
class Windows:
    """Rows of tokens with their targets, as a model reads them: a micro-batch, or text to evaluate
    on.
    """

    tokens: torch.Tensor  # [n, T]
    targets: torch.Tensor  # [n, T] the next token
    reset: torch.Tensor | None = None  # [n, T] true where a document begins; None: documents run on
    source: str = ""  # where the text is from, for people
    # [n, T] the number of the question that a target answers, 0: none; None: a text without
    question: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def columns(self) -> int:
        """T, tokens per row."""
        return self.tokens.shape[1]

    def __getitem__(self, rows: slice | list[int]) -> "Windows":
        return self._map(lambda t: t[rows])

    def between(self, start: int, stop: int) -> "Windows":
        """Columns start .. stop - 1."""
        return self._map(lambda t: t[:, start:stop])

    def to(self, device: torch.device) -> "Windows":
        """The same windows on a device."""
        return self._map(lambda t: t.to(device))

    def _map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "Windows":
        reset, question = (None if t is None else change(t) for t in (self.reset, self.question))
        tokens, targets = change(self.tokens), change(self.targets)
        return replace(self, tokens=tokens, targets=targets, reset=reset, question=question)


class BatchSource:
    """The global batches of a run; `rows` and `text` return any part of any of them.

    A subclass has `fingerprint`, `rows`, and for evaluation `text`.
    """

    batch: int  # rows per step
    fixed: str  # what must not change for the rows to stay the same, for people

    @property
    def fingerprint(self) -> str:
        """Equal for two runs exactly when they see the same tokens at every step."""
        raise NotImplementedError

    def rows(
        self, step: int, first: int = 0, last: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows first .. last - 1 of the global batch of a step: tokens and targets, each [n, T]."""
        windows = self.text(step, first, last)
        return windows.tokens, windows.targets

    def text(
        self, step: int, first: int = 0, last: int | None = None, end_of_text: int | None = None
    ) -> Windows:
        """The same rows as windows; end_of_text: the token at which documents are kept apart."""
        raise NotImplementedError

    def check(self, fingerprint: str) -> None:
        """Raise unless a run with this fingerprint would go on with the same rows."""
        if fingerprint != self.fingerprint:
            raise AmorError(
                "the checkpoint was made with other data "
                f"(fingerprint {fingerprint[:12]}, here {self.fingerprint[:12]}): "
                f"{self.fixed} must be as they were; restore them or start a new run"
            )

    def _last(self, step: int, first: int, last: int | None) -> int:
        """`last`, by default the whole batch; an error where there are no such rows."""
        last = self.batch if last is None else last
        if step < 0 or not 0 <= first <= last <= self.batch:
            raise IndexError(f"step {step}, rows {first}..{last} of a batch of {self.batch}")
        return last


class Batches(BatchSource):
    """The global batches of a run on shards."""

    def __init__(self, shards: Shards, context: int, batch: int, seed: int) -> None:
        if context < 1 or batch < 1:
            raise AmorError(f"context {context} and batch {batch} must be at least 1")
        if shards.tokens < context + 1:
            raise AmorError(
                f"{shards.folder} holds {shards.tokens:,} tokens, "
                f"less than one window of {context:,} + 1; "
                "prepare more text or use a shorter context"
            )
        self.shards, self.context, self.batch, self.seed = shards, context, batch, seed
        self.windows = (shards.tokens - 1) // context
        self.fixed = f"{shards.folder}, seed {seed}, context {context} and batch {batch}"

    @property
    def fingerprint(self) -> str:
        text = f"{self.shards.hash} seed {self.seed} context {self.context} batch {self.batch}"
        return hashlib.sha256(text.encode()).hexdigest()

    def places(self, step: int, first: int = 0, last: int | None = None) -> np.ndarray:
        """The window in each of rows first .. last - 1 of a step."""
        rows = np.arange(first, self._last(step, first, last), dtype=np.int64)
        epochs, positions = np.divmod(rows + step * self.batch, self.windows)
        out = np.empty(len(rows), dtype=np.int64)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            out[here] = permuted(positions[here], self.windows, self.seed, int(epoch))
        return out

    def text(
        self, step: int, first: int = 0, last: int | None = None, end_of_text: int | None = None
    ) -> Windows:
        starts = self.places(step, first, last) * self.context
        rows = np.empty((len(starts), self.context + 1), dtype=np.int64)
        for row, start in enumerate(starts):
            rows[row] = self.shards.read(int(start), self.context + 1)
        return cut(torch.from_numpy(rows), end_of_text)


def cut(rows: torch.Tensor, end_of_text: int | None = None) -> Windows:
    """Windows of T tokens from rows [n, T + 1]."""
    return paired(rows[:, :-1].contiguous(), rows[:, 1:].contiguous(), end_of_text)


def paired(tokens: torch.Tensor, targets: torch.Tensor, end_of_text: int | None = None) -> Windows:
    """Windows of tokens and targets; end_of_text: the token at which documents are kept apart."""
    reset = None if end_of_text is None else document_starts(tokens, end_of_text)
    return Windows(tokens, targets, reset)


def document_starts(tokens: torch.Tensor, end_of_text: int) -> torch.Tensor:
    """`reset` [n, T] for packed documents: true where a document, or the row itself, begins."""
    starts = torch.ones_like(tokens, dtype=torch.bool)
    starts[:, 1:] = tokens[:, :-1] == end_of_text
    return starts
