"""What a gate decides on, and the one place where evidence is computed from a reading of the head.

To add a kind of evidence: a field of `Evidence`, a function in HEAD_EVIDENCE, and a gate that needs
it (amor/gates/<kind>.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Set
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from amor.ops.head.reference import HeadStats


@dataclass(frozen=True)
class Evidence:
    """The inputs of a gate, for tokens of any shape [...].

    Of the numbers after `position` only those it `needs` are set.
    """

    x: Tensor  # [..., D] the block's input, without gradient
    position: Tensor  # [...]
    entropy: Tensor | None = None  # [...] over log(vocab): in [0, 1]
    margin: Tensor | None = None  # [...] best probability minus second best
    varentropy: Tensor | None = None  # [...] variance of -log p, over log(vocab)^2
    # [...] nats the next token gains if the block fires; needs the true next token
    gain: Tensor | None = None
    before: Verdict | None = None  # of the previous block; None at the first


@dataclass(frozen=True)
class Verdict:
    """The decision of a gate, for tokens of any shape [...]."""

    fire: Tensor  # [...] bool
    score: Tensor  # [...] compared with the threshold
    # [...] 1 where it fires, with a gradient; None for a gate that has none
    weight: Tensor | None = None


T = TypeVar("T")


def present(value: T | None) -> T:
    """A number of a reading that was asked for."""
    assert value is not None
    return value


def _entropy(stats: HeadStats, vocab: int) -> Tensor:
    # over log(vocab), so that one threshold means the same for every vocabulary
    return present(stats.entropy) / math.log(vocab)


def _margin(stats: HeadStats, vocab: int) -> Tensor:
    if stats.margin is not None:
        return stats.margin
    p = (present(stats.topk)[0] - present(stats.logsumexp)[:, None]).exp()
    return p[:, 0] - p[:, 1]


def _varentropy(stats: HeadStats, vocab: int) -> Tensor:
    log_p = present(stats.logits) - present(stats.logsumexp)[:, None]
    spread = log_p + present(stats.entropy)[:, None]
    return (log_p.exp() * spread.square()).sum(1) / math.log(vocab) ** 2


# from a reading of n vectors and the vocabulary's size to [n]
HEAD_EVIDENCE: dict[str, Callable[[HeadStats, int], Tensor]] = {
    "entropy": _entropy,
    "margin": _margin,
    "varentropy": _varentropy,
}
FROM_LOGITS = frozenset({"varentropy"})  # those that need all logits, not only sums over them
TILE = 256  # vectors whose logits exist at once


def head_evidence(stats: HeadStats, vocab: int, names: Set[str]) -> dict[str, Tensor]:
    """[n] each: the evidence of these names, of those that the head gives.

    stats: with entropy and logsumexp, and with logits where one of the names needs them.
    """
    return {
        name: HEAD_EVIDENCE[name](stats, vocab) for name in sorted(names & HEAD_EVIDENCE.keys())
    }


def read_evidence(
    x: Tensor, weight: Tensor, names: Set[str], read: Callable[..., HeadStats]
) -> dict[str, Tensor]:
    """[n] each: evidence of vectors x [n, D] by one reading of the head, weight [V, D].

    Names that need all logits cost a second pass, a tile of vectors at a time.
    """
    every = names & FROM_LOGITS
    stats = read(x, weight, entropy="entropy" in names or bool(every), margin="margin" in names)
    values = head_evidence(stats, len(weight), names - every)
    if not every:
        return values
    tiles = []
    for i in range(0, max(len(x), 1), TILE):
        logits = (x[i : i + TILE] @ weight.to(x.dtype).T).float()
        part = HeadStats(
            entropy=present(stats.entropy)[i : i + TILE],
            logsumexp=present(stats.logsumexp)[i : i + TILE],
            logits=logits,
        )
        tiles.append(head_evidence(part, len(weight), every))
    return values | {name: torch.cat([tile[name] for tile in tiles]) for name in sorted(every)}
