"""What an engine says: what is known of each row's next token, and what its steps have spent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from amor.ops.product import entropies


@dataclass
class Next:
    """What is known of each row's next token, and what the gates decided at the last one."""

    fire: Tensor  # [B, K] whether each block fired
    score: Tensor  # [B, K] what its gate compared with the threshold; of an 8-bit copy, within its bound
    logits: Tensor  # [B, V], or [B, 0] where only the best token was wanted
    found: Tensor  # [B, 1] the best token where it was found without the logits, else [B, 0]
    nats: Tensor | None = None  # [B] the entropy where it is known; `entropy` finds it where it is not

    @property
    def best(self) -> Tensor:
        """[B] the token of the largest logit."""
        return self.found[:, 0] if self.found.shape[1] else self.logits.argmax(-1)

    @property
    def entropy(self) -> Tensor:
        """[B] in nats; of an 8-bit copy, within its bound."""
        if self.nats is None:
            self.nats = entropies(self.logits)
        return self.nats

    def map(self, change: Callable[[Tensor], Tensor]) -> Next:
        nats = None if self.nats is None else change(self.nats)
        return Next(change(self.fire), change(self.score), change(self.logits), change(self.found), nats)

    @staticmethod
    def join(every: Sequence[Next]) -> Next:
        """Rows of several. Logits are kept only where all have them: else each keeps its best token alone."""
        if len({n.logits.shape[1] for n in every}) > 1:
            every = [replace(n, nats=n.entropy, logits=n.logits[:, :0], found=n.best[:, None]) for n in every]
        fire, score, logits, found = (
            torch.cat([getattr(n, name) for n in every]) for name in ("fire", "score", "logits", "found")
        )
        nats = None if all(n.nats is None for n in every) else torch.cat([n.entropy for n in every])
        return Next(fire, score, logits, found, nats)


@dataclass
class Tally:
    """What the steps of an engine have spent, counted where it was spent."""

    blocks: int
    steps: int = 0
    tokens: int = 0
    head_passes: int = 0
    cheap_passes: int = 0
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
        """A pass over the 8-bit copy reads a quarter of the bytes, and is counted as a quarter."""
        return (self.head_passes + self.cheap_passes / 4) / max(self.tokens, 1)

    @property
    def skipped(self) -> float:
        """The share of attention, in keys met, that did not run."""
        return self.keys_skipped / max(self.keys_seen + self.keys_skipped, 1)
