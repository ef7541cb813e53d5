"""Whether two folders say the same: logits on a few hundred tokens, at random and of a text."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

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
class Compared:
    """Two models on the same tokens."""

    by: str  # what ran the source
    tokens: int
    difference: float  # the largest of a logit
    largest: float  # logit
    allowed: float
    same_best: int  # tokens after which both hold the same next one likeliest

    @property
    def ok(self) -> bool:
        return self.difference <= self.allowed

    def __str__(self) -> str:
        verdict = "same" if self.ok else "DIFFERS"
        return (
            f"compared with the source run by {self.by}, on {self.tokens} tokens: logits differ by {self.difference:.1e}, "
            f"the largest is {self.largest:.1f} (allowed {self.allowed:.1e}); likeliest next token the same at {self.same_best} "
            f"of {self.tokens}: {verdict}"
        )


@torch.no_grad()
def compare(a: Opened, b: Opened) -> Compared:
    """What two folders say of the same tokens, each by its own library; of a padded vocabulary the tokens alone."""
    vocab = min(a.model.config.vocab, b.model.config.vocab)
    apart, largest, same, count, by = 0.0, 0.0, 0, 0, ""
    for tokens in samples(vocab, a):
        (x, by_a), (y, by_b) = a.logits(tokens), b.logits(tokens)
        x, y = x[..., :vocab].double(), y[..., :vocab].double()
        apart, largest = max(apart, float((x - y).abs().max())), max(largest, float(x.abs().max()))
        same, count = same + int((x.argmax(-1) == y.argmax(-1)).sum()), count + tokens.numel()
        by = by_a if by_b == OWN else f"{by_a}, the result by {by_b}"
    difference = apart if apart == apart else float("inf")
    return Compared(by, count, difference, largest, TOLERANCE[torch.float32] * max(1.0, largest), same)


def samples(vocab: int, opened: Opened) -> list[Tensor]:
    """Random tokens, the same every time, and a text where there is a tokenizer."""
    found = [torch.randint(0, vocab, (ROWS, COLUMNS), generator=torch.Generator().manual_seed(0))]
    tokenizer = opened.tokenizer()
    if tokenizer is not None:
        ids = torch.from_numpy(encode(tokenizer, TEXT)[:MOST].astype("int64"))
        if len(ids) and int(ids.max()) < vocab:
            found.append(ids[None])
    return found
