"""Entropy, logsumexp and nll of the head on a GPU by our Triton kernel, online over the vocabulary.

Best tokens (top-k, margin) and the loss with its gradients are limited by their products, which
torch does as well: for them this backend is the chunked one.
"""

import importlib.util

import torch
from torch import Tensor

from amor.ops import doors
from amor.ops.head import chunked
from amor.ops.head.reference import IGNORE, HeadStats

# of a tile; no autotuning: a choice by measured time could change the numbers
TOKENS, WORDS, WIDTH = 64, 128, 32
SPLITS = 16  # of the vocabulary, so that few tokens still fill a GPU

loss = chunked.loss


def missing() -> str | None:
    """Why this backend cannot run here (no GPU, say), or None."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed; pip install triton"
    return doors.import_error("amor.ops.head.kernel")


@torch.no_grad()
def read(
    x: Tensor,
    weight: Tensor,
    targets: Tensor | None = None,
    entropy: bool = False,
    margin: bool = False,
    topk: int = 0,
) -> HeadStats:
    """As the reference."""
    if margin or topk or not len(x):
        return chunked.read(x, weight, targets, entropy, margin, topk)
    goal = torch.full((len(x),), -1, device=x.device) if targets is None else targets
    partial = _partial(x.contiguous(), weight.contiguous(), goal)
    m, total, weighted, hit = partial.unbind(1)  # [splits, N]
    most = m.amax(0)
    shrink, moved = (m - most).exp(), torch.where(total > 0, m - most, 0.0)
    weighted = (shrink * (weighted + moved * total)).sum(0)
    total = (shrink * total).sum(0)
    log_sum = most + total.log()
    nll = None
    if targets is not None:
        nll = (log_sum - hit.sum(0)).masked_fill(targets == IGNORE, 0.0)
    return HeadStats(nll, total.log() - weighted / total if entropy else None, logsumexp=log_sum)


def _partial(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """[splits, 4, N] the sums of each split of the vocabulary."""
    from amor.ops.head.kernel import read_tile

    count, vocab = len(x), len(weight)
    span = -(-vocab // (SPLITS * WORDS)) * WORDS  # whole tiles, so that no split is cut inside one
    splits = -(-vocab // span)
    out = x.new_empty(splits, 4, count, dtype=torch.float32)
    read_tile[(-(-count // TOKENS), splits)](
        x,
        weight,
        targets,
        out,
        count,
        vocab,
        x.shape[1],
        span,
        TOKENS=TOKENS,
        WORDS=WORDS,
        WIDTH=WIDTH,
    )
    return out
