"""Batches: which tokens a training step sees, as a function of the seed and the step alone.

The stream is cut into windows of `context` tokens, each with the next token as its last target, so
that every token but the first is a target once an epoch; what is left at the end, shorter than a
window, is not used. An epoch is a permutation of the windows (amor.data.order). Row r of step s is
place s * batch + r of the endless sequence of epochs, whoever asks for it: architecture,
micro-batches and ranks have no part in it, and there is no state to save but the step.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch

from amor.data.order import permuted
from amor.data.shards import Shards
from amor.errors import AmorError


class Source(Protocol):
    """Where batches come from: Batches, Generated, or what stands for them."""

    def rows(self, step: int, first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]: ...


class Judging(Source, Protocol):
    """A source of what a model is judged by, too."""

    def text(
        self, step: int, first: int, last: int, end_of_text: int | None = None
    ) -> "Windows": ...


@dataclass(frozen=True)
class Windows:
    """Rows of tokens with those to be predicted, as a model reads them: a micro-batch, or text to
    be judged.
    """

    tokens: torch.Tensor  # [n, T]
    targets: torch.Tensor  # [n, T] one further
    reset: torch.Tensor | None = None  # [n, T] true where a document begins; None: documents run on
    source: str = ""  # where the text is from, for people
    asked: torch.Tensor | None = (
        None  # [n, T] the number of the question a target answers, 0: none; None: nothing is asked
    )

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def columns(self) -> int:
        return self.tokens.shape[1]

    def __getitem__(self, rows: slice) -> "Windows":
        return self._each(lambda t: t[rows])

    def between(self, start: int, stop: int) -> "Windows":
        """Columns start .. stop - 1."""
        return self._each(lambda t: t[:, start:stop])

    def to(self, device: torch.device) -> "Windows":
        return self._each(lambda t: t.to(device))

    def _each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "Windows":
        reset, asked = (None if t is None else change(t) for t in (self.reset, self.asked))
        return replace(
            self, tokens=change(self.tokens), targets=change(self.targets), reset=reset, asked=asked
        )


class Batches:
    """The global batches of a run; `rows` hands out any part of any of them."""

    def __init__(self, shards: Shards, context: int, batch: int, seed: int) -> None:
        if context < 1 or batch < 1:
            raise AmorError(f"context {context} and batch {batch} must be at least 1")
        if shards.tokens < context + 1:
            raise AmorError(
                f"{shards.folder} holds {shards.tokens:,} tokens, less than one window of "
                f"{context:,} + 1; "
                "prepare more text or use a shorter context"
            )
        self.shards, self.context, self.batch, self.seed = shards, context, batch, seed
        self.windows = (shards.tokens - 1) // context

    @property
    def fingerprint(self) -> str:
        """Equal for two runs exactly when they see the same tokens at every step."""
        words = f"{self.shards.hash} seed {self.seed} context {self.context} batch {self.batch}"
        return hashlib.sha256(words.encode()).hexdigest()

    def check(self, fingerprint: str) -> None:
        """Raise unless a run with this fingerprint would go on with the same data in the same
        order.
        """
        if fingerprint != self.fingerprint:
            raise AmorError(
                f"the checkpoint was made with other data (fingerprint {fingerprint[:12]}, here "
                f"{self.fingerprint[:12]}): "
                f"{self.shards.folder}, seed {self.seed}, context {self.context} and batch "
                f"{self.batch} must be as they were; "
                "restore them or start a new run"
            )

    def places(self, step: int, first: int = 0, last: int | None = None) -> np.ndarray:
        """The window in each of rows first .. last - 1 of a step."""
        last = self.batch if last is None else last
        if step < 0 or not 0 <= first <= last <= self.batch:
            raise IndexError(f"step {step}, rows {first}..{last} of a batch of {self.batch}")
        epochs, positions = np.divmod(
            np.arange(first, last, dtype=np.int64) + step * self.batch, self.windows
        )
        out = np.empty(last - first, dtype=np.int64)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            out[here] = permuted(positions[here], self.windows, self.seed, int(epoch))
        return out

    def rows(
        self, step: int, first: int = 0, last: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows first .. last - 1 of the global batch of a step: tokens [n, T] and the targets one
        further [n, T].
        """
        held = self._held(self.places(step, first, last))
        return held[:, :-1].contiguous(), held[:, 1:].contiguous()

    def text(
        self, step: int, first: int = 0, last: int | None = None, end_of_text: int | None = None
    ) -> Windows:
        """The same rows as windows to be judged; with an end-of-text token given, documents stand
        apart.
        """
        return paired(*self.rows(step, first, last), end_of_text)

    def _held(self, places: np.ndarray) -> torch.Tensor:
        rows = [self.shards.read(int(place) * self.context, self.context + 1) for place in places]
        return torch.from_numpy(
            np.stack(rows) if rows else np.empty((0, self.context + 1), dtype=np.int64)
        )


def cut(held: torch.Tensor, end_of_text: int | None = None) -> Windows:
    """Windows of T tokens from rows of T + 1."""
    return paired(held[:, :-1].contiguous(), held[:, 1:].contiguous(), end_of_text)


def paired(tokens: torch.Tensor, targets: torch.Tensor, end_of_text: int | None = None) -> Windows:
    """Windows of tokens and targets; with an end-of-text token given, documents stand apart."""
    return Windows(
        tokens, targets, None if end_of_text is None else document_starts(tokens, end_of_text)
    )


def document_starts(tokens: torch.Tensor, end_of_text: int) -> torch.Tensor:
    """`reset` [n, T] for packed documents: true where a document, or the row itself, begins."""
    starts = torch.ones_like(tokens, dtype=torch.bool)
    starts[:, 1:] = tokens[:, :-1] == end_of_text
    return starts
