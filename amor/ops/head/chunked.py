"""What the tied head says of hidden vectors, a tile of tokens and vocabulary at a time: T x V never exists.

`read` goes over slices of the vocabulary and keeps running sums, so its memory is one tile. `loss` must know a token's
whole softmax before it can form a gradient, so its tile is a few tokens by the whole vocabulary; gradients are formed
on the way, and no logit is computed twice.
"""

from typing import Any

import torch
from torch import Tensor

from amor.ops.head.reference import IGNORE, Reading

READ_TOKENS, READ_SLICE = 512, 4096  # a tile of 8 MB
LOSS_LOGITS = 24_000_000  # logits of one tile of the loss: 96 MB


@torch.no_grad()
def read(x: Tensor, weight: Tensor, targets: Tensor | None = None, entropy: bool = False, margin: bool = False) -> Reading:
    parts = [
        _read_tile(x[i : i + READ_TOKENS], weight, None if targets is None else targets[i : i + READ_TOKENS], margin)
        for i in range(0, len(x), READ_TOKENS)
    ]
    if not parts:
        nothing = x.new_zeros(0, dtype=torch.float32)
        return Reading(nothing, nothing, nothing)
    nll, H, M = (torch.cat(column) for column in zip(*parts, strict=True))
    return Reading(nll if targets is not None else None, H if entropy else None, M if margin else None)


def _read_tile(x: Tensor, weight: Tensor, targets: Tensor | None, margin: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Running maximum m, sum of exp(z - m), sum of z exp(z - m); rescaled whenever the maximum grows."""
    m = x.new_full((len(x),), -torch.inf, dtype=torch.float32)
    total, weighted, hit = torch.zeros_like(m), torch.zeros_like(m), torch.zeros_like(m)
    best = m[:, None].expand(-1, 2)
    for start in range(0, len(weight), READ_SLICE):
        rows = weight[start : start + READ_SLICE]
        z = (x @ rows.to(x.dtype).T).float()
        if targets is not None:
            here = (targets >= start) & (targets < start + len(rows))
            hit = torch.where(here, z.gather(1, (targets - start).clamp(0, len(rows) - 1)[:, None])[:, 0], hit)
        if margin:
            best = torch.cat([best, z.topk(min(2, len(rows)), dim=1).values], 1).topk(2, dim=1).values
        new = torch.maximum(m, z.amax(1))
        shrink = torch.exp(m - new)
        z -= new[:, None]
        e = z.exp()
        # sum of z' exp(z') with z' = z - m; moving the maximum by d moves it by d times the sum
        moved = torch.where(total > 0, (m - new) * total, 0.0)
        weighted = shrink * (weighted + moved) + torch.linalg.vecdot(e, z)
        total = shrink * total + e.sum(1)
        m = new
    log_sum = total.log()
    entropy = log_sum - weighted / total
    M = torch.exp(best[:, 0] - m - log_sum) - torch.exp(best[:, 1] - m - log_sum) if margin else m
    nll = m + log_sum - hit
    if targets is not None:
        nll = nll.masked_fill(targets == IGNORE, 0.0)
    return nll, entropy, M


class _Loss(torch.autograd.Function):
    """Sum of share * nll, with both gradients formed in the forward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, share: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        tokens = max(1, LOSS_LOGITS // len(weight))
        head = weight.to(x.dtype)
        wants_x, wants_weight = ctx.needs_input_grad[:2]
        grad_x = torch.empty_like(x) if wants_x else None
        grad_weight = torch.zeros_like(weight) if wants_weight else None
        nll, entropy = (x.new_empty(len(x), dtype=torch.float32) for _ in range(2))
        for start in range(0, len(x), tokens):
            part = slice(start, start + tokens)
            goal, scored = targets[part].clamp(min=0)[:, None], targets[part] != IGNORE
            z = (x[part] @ head.T).float()
            log_sum = z.logsumexp(1, keepdim=True)
            nll[part] = (log_sum - z.gather(1, goal))[:, 0] * scored
            z -= log_sum
            p = z.exp()
            entropy[part] = -torch.linalg.vecdot(p, z)
            if not (wants_x or wants_weight):
                continue
            p.scatter_add_(1, goal, -torch.ones_like(goal, dtype=p.dtype))
            p *= (share[part] * scored)[:, None]
            p = p.to(x.dtype)
            if grad_x is not None:
                grad_x[part] = p @ head
            if grad_weight is not None:
                grad_weight.addmm_(p.T.to(weight.dtype), x[part].to(weight.dtype))
        ctx.save_for_backward(grad_x, grad_weight)
        ctx.mark_non_differentiable(nll, entropy)
        return (nll * share).sum(), nll, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        scale = grads[0]
        grad_x, grad_weight = ctx.saved_tensors
        return (
            None if grad_x is None else grad_x * scale.to(grad_x.dtype),
            None if grad_weight is None else grad_weight.mul_(scale.to(grad_weight.dtype)),
            None,
            None,
        )


def loss(x: Tensor, weight: Tensor, targets: Tensor, share: Tensor) -> tuple[Tensor, Reading]:
    """sum_i share_i nll_i, differentiable in x and weight, and the reading of every token on the way."""
    total, nll, entropy = _Loss.apply(x, weight, targets, share)
    return total, Reading(nll, entropy)
