"""Statistics of the head's logits, from all of them at once: the definition."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORE = -100  # a target that is not scored


@dataclass(frozen=True)
class HeadStats:
    """Statistics of N next-token distributions in float32; None where not asked for."""

    # [N] negative log-likelihood of the target, 0 where it is IGNORE; the only one with a gradient
    nll: Tensor | None = None
    entropy: Tensor | None = None  # [N] in nats
    margin: Tensor | None = None  # [N] probability of the best token minus that of the second
    logsumexp: Tensor | None = None  # [N] of the logits
    topk: tuple[Tensor, Tensor] | None = None  # [N, k] the largest logits, falling; their tokens
    logits: Tensor | None = None  # [N, V], or those of the last vectors only


def read(
    x: Tensor,  # [N, D]
    weight: Tensor,  # [V, D]
    targets: Tensor | None = None,  # [N]
    entropy: bool = False,
    margin: bool = False,
    topk: int = 0,
) -> HeadStats:
    """Statistics of the logits x W^T; entropy, margin and the `topk` best only where asked for."""
    logits = (x @ weight.to(x.dtype).T).float()
    nll = None
    if targets is not None:
        nll = F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="none")
    with torch.no_grad():
        logp = logits.log_softmax(-1)
        H = -(logp.exp() * logp).sum(-1) if entropy else None
        M = None
        if margin:
            best = logp.topk(2, dim=-1).values.exp()
            M = best[:, 0] - best[:, 1]
        values, ids = logits.topk(topk, dim=-1)
        return HeadStats(nll, H, M, logits.logsumexp(-1), (values, ids) if topk else None)


def loss(
    x: Tensor, weight: Tensor, targets: Tensor, target_weight: Tensor
) -> tuple[Tensor, HeadStats]:
    """sum_i target_weight_i nll_i, differentiable in x and weight, and statistics per token.

    x [N, D], weight [V, D], targets [N], target_weight [N].
    """
    reading = read(x, weight, targets, entropy=True)
    assert reading.nll is not None
    return (reading.nll * target_weight).sum(), HeadStats(
        reading.nll.detach(), reading.entropy, logsumexp=reading.logsumexp
    )
