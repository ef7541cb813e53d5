"""The result of a decode step, and counts of the work that steps did."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from amor.ops.product import entropies


@dataclass
class StepOutput:
    """The prediction of each row's next token, and the gates' decisions at the last one."""

    fire: Tensor  # [B, K] whether each block fired
    score: Tensor  # [B, K] the score that its gate compared with the threshold
    logits: Tensor  # [B, V]
    known_entropy: Tensor | None = None  # [B] where the step computed it on the way

    @property
    def greedy_token(self) -> Tensor:
        """[B] the token of the largest logit."""
        return self.logits.argmax(-1)

    @property
    def entropy(self) -> Tensor:
        """[B] of the next token, in nats; computed from the logits where it is not known."""
        if self.known_entropy is None:
            self.known_entropy = entropies(self.logits)
        return self.known_entropy

    def map(self, change: Callable[[Tensor], Tensor]) -> StepOutput:
        """The same with every tensor changed, such as a selection of rows."""
        entropy = None if self.known_entropy is None else change(self.known_entropy)
        return StepOutput(change(self.fire), change(self.score), change(self.logits), entropy)

    @staticmethod
    def join(every: Sequence[StepOutput]) -> StepOutput:
        """The rows of several outputs."""
        fire, score, logits = (
            torch.cat([getattr(n, name) for n in every]) for name in ("fire", "score", "logits")
        )
        unknown = all(n.known_entropy is None for n in every)
        return StepOutput(
            fire, score, logits, None if unknown else torch.cat([n.entropy for n in every])
        )


@dataclass
class DecodeStats:
    """Counts of the work of an engine, made where the work is done."""

    blocks: int
    steps: int = 0
    tokens: int = 0
    head_passes: int = 0
    prompt_tokens: int = 0
    prompt_seconds: float = 0.0
    prompt_head_rows: int = 0  # vectors the head read in prefill
    fired: list[int] = field(default_factory=list)  # tokens that fired, per block
    drafted: int = 0  # draft tokens read
    accepted: int = 0  # draft tokens that were kept
    keys_attended: int = 0  # keys that queries attended to, over all blocks
    keys_skipped: int = 0  # keys that the queries of closed blocks would have attended to

    def __post_init__(self) -> None:
        self.fired = self.fired or [0] * self.blocks

    @property
    def fire_rates(self) -> list[float]:
        """Per block, in [0, 1]."""
        return [f / max(self.tokens, 1) for f in self.fired]

    @property
    def head_passes_per_token(self) -> float:
        """Passes over the head's weights per generated token."""
        return self.head_passes / max(self.tokens, 1)

    @property
    def skipped(self) -> float:
        """The fraction of attention, in keys, that did not run."""
        return self.keys_skipped / max(self.keys_attended + self.keys_skipped, 1)
