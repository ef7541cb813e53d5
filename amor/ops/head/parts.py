"""Joins the statistics of a head whose vocabulary is split over ranks."""

import torch
from torch import Tensor

from amor.ops.head.reference import HeadStats


def pack_stats(reading: HeadStats) -> Tensor:
    """[N, 2 + k] the numbers of one part: logsumexp, entropy and its k best logits."""
    assert reading.logsumexp is not None and reading.entropy is not None
    best = reading.topk[0].unbind(1) if reading.topk else ()
    return torch.stack([reading.logsumexp, reading.entropy, *best], 1)


def nothing(tokens: int, best: int, device: torch.device) -> Tensor:
    """[tokens, 2 + best] the numbers of a part without any word of the vocabulary."""
    return torch.full((tokens, 2 + best), -torch.inf, device=device)


def joined(parts: Tensor) -> HeadStats:
    """Statistics from `pack_stats` of all parts, [parts, N, 2 + k]; the margin where k >= 2.

    With w the probability of a part: H = sum w (H_part - log w).
    """
    total = parts[..., 0].logsumexp(0)
    log_share = parts[..., 0] - total
    share = log_share.exp()
    entropy = torch.where(share > 0, share * (parts[..., 1] - log_share), 0.0).sum(0)
    margin = None
    if parts.shape[2] > 3:
        p = (parts[..., 2:].transpose(0, 1).flatten(1).topk(2, dim=1).values - total[:, None]).exp()
        margin = p[:, 0] - p[:, 1]
    return HeadStats(entropy=entropy, margin=margin, logsumexp=total)
