"""Choosing the next token: repetition penalty, temperature, top-k, top-p, min-p, in this order.

Every row draws from its own random stream, seeded by the seed and the row's id, so its text does
not depend on the other rows or on its place in the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from amor.errors import AmorError

FEW = 1024  # candidates tried first: sorting a whole vocabulary costs more than a step


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.

    Attributes:
        temperature: logits are divided by it; 0 is greedy, 1 the model's own distribution. 0.8
            because small models write more coherent text a little below 1.
        top_k: only the k most probable tokens; 0: all.
        top_p: only the most probable tokens that together reach this probability; 1: all.
        min_p: only tokens at least this fraction as probable as the most probable; 0: all.
        repetition_penalty: divides positive logits of the row's earlier tokens and multiplies
            negative ones; 1 changes nothing.
        seed: the same seed gives the same text on the same machine.
    """

    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        _between("temperature", self.temperature, 0, None)
        _between("top_k", self.top_k, 0, None)
        _between("top_p", self.top_p, 0, 1)
        _between("min_p", self.min_p, 0, 1)
        if not self.repetition_penalty > 0:
            raise AmorError(
                f"repetition_penalty is {self.repetition_penalty}; it must be above 0, and 1 "
                "changes nothing"
            )

    @property
    def greedy(self) -> bool:
        """Whether the best token is always chosen."""
        return self.temperature == 0 or self.top_k == 1


def _between(name: str, value: float, least: float, most: float | None) -> None:
    if not value >= least or (most is not None and value > most):
        raise AmorError(
            f"{name} is {value}; it must be at least {least}"
            + ("" if most is None else f" and at most {most}")
        )


class Sampler:
    """Chooses tokens for rows that join and leave."""

    def __init__(
        self, sampling: Sampling, ids: Sequence[int], prompts: Sequence[Sequence[int]], vocab: int
    ):
        """ids: one per row, seeding its stream; prompts: the tokens of each row so far."""
        self.sampling, self.vocab = sampling, vocab
        self.generators = [torch.Generator().manual_seed(_mixed(sampling.seed, row)) for row in ids]
        self.used: Tensor | None = None  # [B, V] earlier tokens of each row
        if sampling.repetition_penalty != 1:
            self.used = torch.zeros(len(ids), vocab, dtype=torch.bool)
            for row, tokens in enumerate(prompts):
                self.used[row, torch.tensor(tokens, dtype=torch.long)] = True

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows only."""
        self.generators = [self.generators[r] for r in rows]
        self.used = None if self.used is None else self.used[list(rows)]

    def join(self, other: Sampler) -> None:
        """Append the rows of another."""
        self.generators += other.generators
        if self.used is not None and other.used is not None:
            self.used = torch.cat([self.used, other.used])

    def choose(self, logits: Tensor, rows: Sequence[int] | None = None) -> Tensor:
        """One token per row, [n], from logits [n, V]; rows: their numbers, None: all rows."""
        rows = range(len(self.generators)) if rows is None else rows
        if not bool(logits.amax(-1).isfinite().all()):
            raise AmorError(
                "the model's logits are not finite (NaN or infinity): its weights are too large "
                "or damaged"
            )
        if self.used is not None:
            logits = penalised(
                *(logits, self.used[list(rows)].to(logits.device)),
                self.sampling.repetition_penalty,
            )
        if self.sampling.greedy:
            chosen = logits.argmax(-1)
        else:
            chosen = draw(
                logits,
                self.sampling,
                torch.cat([torch.rand(1, generator=self.generators[r]) for r in rows]),
            )
        if self.used is not None:
            self.used[list(rows), chosen.cpu()] = True
        return chosen


def _mixed(seed: int, row: int) -> int:
    return (seed * 0x9E3779B97F4A7C15 + row * 0xBF58476D1CE4E5B9 + 1) % 2**63


def penalised(logits: Tensor, used: Tensor, penalty: float) -> Tensor:
    """Logits with the repetition penalty on tokens `used` [B, V]."""
    return torch.where(used, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def draw(logits: Tensor, sampling: Sampling, uniform: Tensor) -> Tensor:
    """The token at the place `uniform` [B] in [0, 1) of the cumulated probabilities."""
    kept, tokens = candidates(logits.float() / sampling.temperature, sampling)
    cumulated = kept.double().cumsum(1)
    # the first whose sum exceeds the place: there the sum rises, so its probability is not 0
    place = uniform.to(logits.device).double()[:, None] * cumulated[:, -1:]
    index = torch.searchsorted(cumulated, place, right=True)
    return (index if tokens is None else tokens.gather(1, index))[:, 0]


def candidates(scaled: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor | None]:
    """Probabilities [B, n] of the candidates, 0 where excluded, and their tokens (None: all)."""
    vocab = scaled.shape[1]
    if not sampling.top_k and sampling.top_p == 1 and sampling.min_p == 0:
        return scaled.softmax(1), None
    values, tokens = scaled.topk(min(sampling.top_k or FEW, vocab), dim=1)
    log_sum = (values if sampling.top_k else scaled).logsumexp(1, keepdim=True)
    if not sampling.top_k and not bool(_closed((values - log_sum).exp(), sampling).all()):
        values, tokens = scaled.sort(dim=1, descending=True)
    p = (values - log_sum).exp()
    # a token stays while the sum before it is below top_p: the best always stays
    keep = (p.cumsum(1) - p < sampling.top_p) & (p >= sampling.min_p * p[:, :1])
    keep[:, 0] = True
    return p * keep, tokens


def _closed(p: Tensor, sampling: Sampling) -> Tensor:
    """[B] whether the candidates so far are all that top-p and min-p will leave."""
    return (p.sum(1) >= sampling.top_p) | (p[:, -1] < sampling.min_p * p[:, 0])
