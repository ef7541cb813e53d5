"""Whether two folders compute the same: logits on a few hundred tokens, random ones and a text."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from amor.convert.base import Outputs
from amor.convert.opened import OWN, Opened
from amor.judge.check import TOLERANCE
from amor.judge.windows import encode

# of random tokens: longer than a chunk of any kernel, and no multiple of one
ROWS, COLUMNS = 2, 130
MOST = 200  # tokens of the text
TEXT = (
    "It is a truth universally acknowledged, that a single man in possession of a good fortune, "
    "must be in want of a wife. However little known the feelings or views of such a man may be on "
    "his first entering a neighbourhood, this truth is so well fixed in the minds of the "
    "surrounding families, that he is considered the rightful property of some one or other of "
    "their daughters."
)


@dataclass(frozen=True)
class GatesCompared:
    """Gate decisions of two models on the same tokens, all blocks together.

    Attributes:
        decisions: blocks times tokens.
        differing: how many of them differ, ties left out.
        ties: entropies within float32 rounding of the threshold, on different sides of it.
        entropy_difference: the largest, divided by log V.
    """

    decisions: int
    differing: int
    ties: int
    entropy_difference: float

    @property
    def ok(self) -> bool:
        """Whether the decisions are the same and the entropies within rounding."""
        return not self.differing and self.entropy_difference <= TOLERANCE[torch.float32]

    def __str__(self) -> str:
        return (
            f"; gate decisions differ at {self.differing} of {self.decisions:,} "
            f"(besides {self.ties} within rounding of the threshold), "
            f"entropies by {self.entropy_difference:.1e}"
        )


@dataclass(frozen=True)
class Compared:
    """Outputs of two models for the same tokens.

    Attributes:
        by: what ran the source.
        tokens: how many were read.
        difference: the largest difference of a logit.
        largest: the largest absolute logit.
        allowed: the largest difference that rounding explains: 1e-4 of the largest logit, which
            `amor check` allows float32 too.
        same_best: tokens after which both models have the same likeliest next token.
        gates: of layouts that have gates.
    """

    by: str
    tokens: int
    difference: float
    largest: float
    allowed: float
    same_best: int
    gates: GatesCompared | None = None

    @property
    def ok(self) -> bool:
        """Whether both compute the same within rounding."""
        return self.difference <= self.allowed and (self.gates is None or self.gates.ok)

    def __str__(self) -> str:
        return (
            f"compared with the source run by {self.by}, on {self.tokens} tokens: "
            f"logits differ by {self.difference:.1e}, the largest is {self.largest:.1f} "
            f"(allowed {self.allowed:.1e}); likeliest next token the same at {self.same_best} "
            f"of {self.tokens}{self.gates or ''}: {'same' if self.ok else 'DIFFERS'}"
        )


@torch.no_grad()
def compare(a: Opened, b: Opened) -> Compared:
    """Outputs of two folders for the same tokens, each by its own library.

    Of a padded vocabulary only the tokens that both have are compared.
    """
    vocab = min(a.model.config.vocab, b.model.config.vocab)
    pairs = [both(a, b, tokens) for tokens in samples(vocab, a)]
    logits = [(x.logits[..., :vocab].double(), y.logits[..., :vocab].double()) for x, y in pairs]
    largest = max(float(x.abs().max()) for x, _ in logits)
    by_a, by_b = pairs[0][0].by, pairs[0][1].by
    return Compared(
        by=by_a if by_b == OWN else f"{by_a}, the result by {by_b}",
        tokens=sum(x[..., 0].numel() for x, _ in logits),
        difference=max(largest_difference(x, y) for x, y in logits),
        largest=largest,
        allowed=TOLERANCE[torch.float32] * max(1.0, largest),
        same_best=sum(int((x.argmax(-1) == y.argmax(-1)).sum()) for x, y in logits),
        gates=None if a.layout is None and b.layout is None else compare_gates(pairs),
    )


def both(a: Opened, b: Opened, tokens: Tensor) -> tuple[Outputs, Outputs]:
    """Outputs of both. The one that is not ours runs second: where an entropy is within rounding of
    a threshold it takes over the decision of ours, or every later token would differ too."""
    if a.layout is None:
        first = a.outputs(tokens)
        return first, b.outputs(tokens, first.fire)
    second = b.outputs(tokens)
    return a.outputs(tokens, second.fire), second


def compare_gates(pairs: list[tuple[Outputs, Outputs]]) -> GatesCompared | None:
    """Decisions and entropies of both; None where one has no gates."""
    differing, decisions, apart = 0, 0, 0.0
    for x, y in pairs:
        if x.fire is None or y.fire is None or x.entropy is None or y.entropy is None:
            return None
        decisions += x.fire.numel()
        differing += int((x.fire != y.fire).sum())
        apart = max(apart, largest_difference(x.entropy, y.entropy))
    return GatesCompared(decisions, differing, sum(x.ties + y.ties for x, y in pairs), apart)


def largest_difference(x: Tensor, y: Tensor) -> float:
    """Infinite where a number is NaN."""
    difference = float((x.double() - y.double()).abs().max())
    return math.inf if math.isnan(difference) else difference


def samples(vocab: int, opened: Opened) -> list[Tensor]:
    """Random tokens, the same every time, and a text where there is a tokenizer."""
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(0, vocab, (ROWS, COLUMNS), generator=generator)]
    tokenizer = opened.tokenizer()
    if tokenizer is not None:
        ids = torch.from_numpy(encode(tokenizer, TEXT)[:MOST].astype("int64"))
        if len(ids) and int(ids.max()) < vocab:
            texts.append(ids[None])
    return texts
