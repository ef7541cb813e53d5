"""What an engine says: what is known of each row's next token, and what its steps have spent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from amor.ops.product import entropies


@dataclass
class Next:
    """What is known of each row's next token, and what the gates decided at the last one."""

    fire: Tensor  # [B, K] whether each block fired
    score: Tensor  # [B, K] what its gate compared with the threshold
    logits: Tensor  # [B, V]
    nats: Tensor | None = None  # [B] the entropy where it is known; `entropy` finds it where it is not

    @property
    def best(self) -> Tensor:
        """[B] the token of the largest logit."""
        return self.logits.argmax(-1)

    @property
    def entropy(self) -> Tensor:
        """[B] in nats."""
        if self.nats is None:
            self.nats = entropies(self.logits)
        return self.nats

    def map(self, change: Callable[[Tensor], Tensor]) -> Next:
        nats = None if self.nats is None else change(self.nats)
        return Next(change(self.fire), change(self.score), change(self.logits), nats)

    @staticmethod
    def join(every: Sequence[Next]) -> Next:
        """Rows of several."""
        fire, score, logits = (torch.cat([getattr(n, name) for n in every]) for name in ("fire", "score", "logits"))
        nats = None if all(n.nats is None for n in every) else torch.cat([n.entropy for n in every])
        return Next(fire, score, logits, nats)


@dataclass
class Tally:
    """What the steps of an engine have spent, counted where it was spent."""

    blocks: int
    steps: int = 0
    tokens: int = 0
    head_passes: int = 0
    prompt_tokens: int = 0
    prompt_seconds: float = 0.0
    prompt_head_rows: int = 0  # vectors the head was asked for while reading prompts
    fired: list[int] = field(default_factory=list)  # tokens that fired, a block
    keys_seen: int = 0  # keys met by queries that ran, over all blocks
    keys_skipped: int = 0  # keys that queries that did not run would have met

    def __post_init__(self) -> None:
        self.fired = self.fired or [0] * self.blocks

    @property
    def fire_rates(self) -> list[float]:
        return [f / max(self.tokens, 1) for f in self.fired]

    @property
    def head_passes_a_token(self) -> float:
        return self.head_passes / max(self.tokens, 1)

    @property
    def skipped(self) -> float:
        """The share of attention, in keys met, that did not run."""
        return self.keys_skipped / max(self.keys_seen + self.keys_skipped, 1)
