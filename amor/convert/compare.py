"""Whether two folders say the same: logits on a few hundred tokens, at random and of a text."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from amor.convert.base import Outputs
from amor.convert.opened import OWN, Opened
from amor.judge.check import TOLERANCE
from amor.judge.windows import encode

ROWS, COLUMNS = 2, 130  # of random tokens: longer than a chunk of any kernel, and no multiple of one
MOST = 200  # tokens of the text
TEXT = (
    "It is a truth universally acknowledged, that a single man in possession of a good fortune, must be in want of a wife. "
    "However little known the feelings or views of such a man may be on his first entering a neighbourhood, this truth is so "
    "well fixed in the minds of the surrounding families, that he is considered the rightful property of some one or other of "
    "their daughters."
)


@dataclass(frozen=True)
class GatesCompared:
    """Gate decisions of two models on the same tokens, all blocks together."""

    decisions: int
    differing: int
    ties: int  # within float32 rounding of the threshold, on different sides of it
    entropy_difference: float  # the largest, over log V

    @property
    def ok(self) -> bool:
        return not self.differing and self.entropy_difference <= TOLERANCE[torch.float32]

    def __str__(self) -> str:
        return (
            f"; gate decisions differ at {self.differing} of {self.decisions:,} (besides {self.ties} within rounding of the "
            f"threshold), entropies by {self.entropy_difference:.1e}"
        )


@dataclass(frozen=True)
class Compared:
    """Two models on the same tokens."""

    by: str  # what ran the source
    tokens: int
    difference: float  # the largest of a logit
    largest: float  # logit
    allowed: float
    same_best: int  # tokens after which both hold the same next one likeliest
    gates: GatesCompared | None = None  # of layouts that have gates

    @property
    def ok(self) -> bool:
        return self.difference <= self.allowed and (self.gates is None or self.gates.ok)

    def __str__(self) -> str:
        verdict = "same" if self.ok else "DIFFERS"
        return (
            f"compared with the source run by {self.by}, on {self.tokens} tokens: logits differ by {self.difference:.1e}, "
            f"the largest is {self.largest:.1f} (allowed {self.allowed:.1e}); likeliest next token the same at {self.same_best} "
            f"of {self.tokens}{self.gates or ''}: {verdict}"
        )


@torch.no_grad()
def compare(a: Opened, b: Opened) -> Compared:
    """What two folders say of the same tokens, each by its own library; of a padded vocabulary the tokens alone."""
    vocab = min(a.model.config.vocab, b.model.config.vocab)
    apart, largest, same, count, by = 0.0, 0.0, 0, 0, ""
    gates: GatesCompared | None = None
    for tokens in samples(vocab, a):
        one, other = both(a, b, tokens)
        if a.layout is not None or b.layout is not None:
            gates = compare_gates(one, other, gates)
        by_a, by_b = one.by, other.by
        x, y = one.logits[..., :vocab].double(), other.logits[..., :vocab].double()
        apart, largest = max(apart, float((x - y).abs().max())), max(largest, float(x.abs().max()))
        same, count = same + int((x.argmax(-1) == y.argmax(-1)).sum()), count + tokens.numel()
        by = by_a if by_b == OWN else f"{by_a}, the result by {by_b}"
    difference = apart if apart == apart else float("inf")
    return Compared(by, count, difference, largest, TOLERANCE[torch.float32] * max(1.0, largest), same, gates)


def both(a: Opened, b: Opened, tokens: Tensor) -> tuple[Outputs, Outputs]:
    """Outputs of both. The one that is not ours runs second: where an entropy is within rounding of a
    threshold it takes over the decision of ours, or every later token would differ too."""
    if a.layout is None:
        one = a.outputs(tokens)
        return one, b.outputs(tokens, one.fire)
    other = b.outputs(tokens)
    return a.outputs(tokens, other.fire), other


def compare_gates(a: Outputs, b: Outputs, before: GatesCompared | None) -> GatesCompared | None:
    """Decisions and entropies of both, added to those compared before; none where one has no gates."""
    if a.fire is None or b.fire is None or a.entropy is None or b.entropy is None:
        return before
    known = before or GatesCompared(0, 0, 0, 0.0)
    apart = float((a.entropy.double() - b.entropy.double()).abs().max())
    return GatesCompared(
        known.decisions + a.fire.numel(),
        known.differing + int((a.fire != b.fire).sum()),
        known.ties + a.ties + b.ties,
        max(known.entropy_difference, apart if apart == apart else float("inf")),
    )


def samples(vocab: int, opened: Opened) -> list[Tensor]:
    """Random tokens, the same every time, and a text where there is a tokenizer."""
    found = [torch.randint(0, vocab, (ROWS, COLUMNS), generator=torch.Generator().manual_seed(0))]
    tokenizer = opened.tokenizer()
    if tokenizer is not None:
        ids = torch.from_numpy(encode(tokenizer, TEXT)[:MOST].astype("int64"))
        if len(ids) and int(ids.max()) < vocab:
            found.append(ids[None])
    return found
