"""Statistics and loss of the head a tile of tokens and vocabulary at a time: T x V never exists.

`read` goes over slices of the vocabulary and keeps running sums, so its memory is one tile. `loss`
needs a token's whole softmax before it can form a gradient, so its tile is a few tokens by the
whole vocabulary; gradients are formed on the way, and no logit is computed twice. What is done to a
tile after its product is a parameter (`Sums`, `finish`): here it is written in torch and runs on
every device, `native.py` has it in C++.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from amor.errors import AmorError
from amor.ops.head.reference import IGNORE, HeadStats

READ_TOKENS, READ_SLICE = 512, 4096  # a tile of 8 MB: torch's passes over it stay in the cache
LOSS_TOKENS = 1024  # of a tile of the loss: more do not fit the cache
LOSS_LOGITS = 24_000_000  # logits of one tile of the loss: 96 MB, and two more while it is finished


class Sums:
    """Running maximum m, sum of exp(z - m), sum of (z - m) exp(z - m), and the best logits so far.

    tokens: N; best: how many of the largest logits are kept per token.
    """

    def __init__(self, tokens: int, best: int, device: torch.device):
        self.m = torch.full((tokens,), -torch.inf, device=device)
        self.total, self.weighted = torch.zeros_like(self.m), torch.zeros_like(self.m)
        self.values = torch.full((tokens, best), -torch.inf, device=device)
        self.ids = torch.zeros(tokens, best, dtype=torch.long, device=device)

    def take(self, z: Tensor, start: int) -> None:
        """Add logits z [N, n] of the vocabulary from `start` on; z is overwritten."""
        if self.values.shape[1]:
            values, ids = z.topk(min(self.values.shape[1], z.shape[1]), dim=1)
            values, ids = torch.cat([self.values, values], 1), torch.cat([self.ids, ids + start], 1)
            self.values, order = values.topk(self.values.shape[1], dim=1)
            self.ids = ids.gather(1, order)
        new = torch.maximum(self.m, z.amax(1))
        shrink = torch.exp(self.m - new)
        z -= new[:, None]
        e = z.exp()
        # moving the maximum by d moves the weighted sum by d times the sum
        moved = torch.where(self.total > 0, (self.m - new) * self.total, 0.0)
        self.weighted = shrink * (self.weighted + moved) + torch.linalg.vecdot(e, z)
        self.total = shrink * self.total + e.sum(1)
        self.m = new

    def logsumexp(self) -> Tensor:
        """[N] of the logits so far."""
        return self.m + self.total.log()

    def entropy(self) -> Tensor:
        """[N] of the softmax of the logits so far, in nats."""
        return self.total.log() - self.weighted / self.total


def finish(
    z: Tensor, goal: Tensor, target_weight: Tensor, gradient: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Of whole rows of logits: nll, entropy, logsumexp; with gradient, p and scale such that
    p * scale = target_weight * (softmax - target)."""
    log_sum = z.logsumexp(1, keepdim=True)
    nll = (log_sum - z.gather(1, goal[:, None]))[:, 0]
    z -= log_sum
    p = z.exp()
    entropy = -torch.linalg.vecdot(p, z)
    if gradient:
        p.scatter_add_(1, goal[:, None], -torch.ones_like(goal, dtype=p.dtype)[:, None])
    return nll, entropy, log_sum[:, 0], p, target_weight


Multiply = Callable[..., Tensor]


def multiply(out: Tensor, a: Tensor, b: Tensor, add: bool = False) -> Tensor:
    """out = a b, or += where `add`."""
    return out.addmm_(a, b) if add else torch.mm(a, b, out=out)


@torch.no_grad()
def read(
    x: Tensor,
    weight: Tensor,
    targets: Tensor | None = None,
    entropy: bool = False,
    margin: bool = False,
    topk: int = 0,
    sums: type[Sums] = Sums,
    tile: tuple[int, int] = (READ_TOKENS, READ_SLICE),
    multiply: Multiply = multiply,
) -> HeadStats:
    """As the reference; sums, tile (tokens, vocabulary) and multiply are those of a backend."""
    nothing = torch.zeros(len(x), 0, dtype=torch.long, device=x.device)
    picked = nothing if targets is None else targets.clamp(min=0)[:, None]
    best = max(topk, 2 if margin else 0)
    parts = [
        _read_rows(
            x[i : i + tile[0]], weight, picked[i : i + tile[0]], sums, best, tile[1], multiply
        )
        for i in range(0, max(len(x), 1), tile[0])
    ]
    H, log_sum, values, ids, logits = (torch.cat(column) for column in zip(*parts, strict=True))
    nll = None
    if targets is not None:
        nll = (log_sum - logits[:, 0]).masked_fill(targets == IGNORE, 0.0)
    M = None
    if margin:
        p = (values[:, :2] - log_sum[:, None]).exp()
        M = p[:, 0] - p[:, 1]
    top = (values[:, :topk], ids[:, :topk]) if topk else None
    return HeadStats(nll, H if entropy else None, M, log_sum, top)


def _read_rows(
    x: Tensor,
    weight: Tensor,
    picked: Tensor,
    sums: type[Sums],
    best: int,
    width: int,
    multiply: Multiply,
) -> tuple[Tensor, ...]:
    """Entropy, logsumexp, best logits and their tokens, and the logits of the tokens `picked`.

    x [n, D], over the whole vocabulary in slices of `width`.
    """
    seen = sums(len(x), best, x.device)
    logits = torch.zeros(picked.shape, device=x.device)
    workspace = x.new_empty(len(x) * min(width, len(weight)))
    for start in range(0, len(weight), width):
        rows = weight[start : start + width].to(x.dtype)
        z = multiply(workspace[: len(x) * len(rows)].view(len(x), len(rows)), x, rows.T).float()
        if picked.shape[1]:
            here = (picked >= start) & (picked < start + len(rows))
            logits = torch.where(
                here, z.gather(1, (picked - start).clamp(0, len(rows) - 1)), logits
            )
        seen.take(z, start)
    return seen.entropy(), seen.logsumexp(), seen.values, seen.ids, logits


Finish = Callable[[Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor, Tensor, Tensor, Tensor]]


class _Loss(torch.autograd.Function):
    """Sum of target_weight * nll, with both gradients formed in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        targets: Tensor,
        target_weight: Tensor,
        finish: Finish,
        logits: int,
        multiply: Multiply,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        # tiles, of even size: a small last one would waste a pass over the head
        count = -(-len(x) * len(weight) // logits)
        tokens = max(1, min(LOSS_TOKENS, -(-len(x) // max(count, 1))))
        head = weight.to(x.dtype)
        wants_x, wants_weight = ctx.needs_input_grad[:2]
        grad_x = x.new_empty(x.shape) if wants_x else None
        grad_weight = None
        target_weight = target_weight * (targets != IGNORE)
        nll, entropy, log_sum = (x.new_empty(len(x), dtype=torch.float32) for _ in range(3))
        workspace = x.new_empty(min(tokens, len(x)) * len(weight))
        for start in range(0, len(x), tokens):
            part = slice(start, start + tokens)
            mine = x[part]
            z = multiply(
                workspace[: len(mine) * len(weight)].view(len(mine), len(weight)), mine, head.T
            ).float()
            goal = targets[part].clamp(min=0)
            nll[part], entropy[part], log_sum[part], p, scale = finish(
                z, goal, target_weight[part], wants_x or wants_weight
            )
            # scale is per row: applied to the products, whose rows are shorter than p's
            p, scale = p.to(x.dtype), scale[:, None].to(x.dtype)
            if grad_x is not None:
                multiply(grad_x[part], p, head).mul_(scale)
            if wants_weight:
                mine, p = (mine * scale).to(weight.dtype), p.to(weight.dtype)
                first = grad_weight is None
                grad_weight = multiply(
                    weight.new_empty(weight.shape) if first else grad_weight,
                    p.T,
                    mine,
                    add=not first,
                )
        if wants_weight and grad_weight is None:
            grad_weight = torch.zeros_like(weight)
        # not saved_tensors: the only reference is handed on, so that no copy is made
        ctx.gradients = grad_x, grad_weight
        nll.masked_fill_(targets == IGNORE, 0.0)
        ctx.mark_non_differentiable(nll, entropy, log_sum)
        return (nll * target_weight).sum(), nll, entropy, log_sum

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise AmorError(
                "the head's gradient was used up by an earlier backward; compute the loss again"
            )
        gradients, ctx.gradients = ctx.gradients, None
        # a factor of 1 is usual, and saves a pass over the head
        if grads[0].device.type != "cpu" or float(grads[0]) != 1.0:
            gradients = tuple(
                None if g is None else g.mul_(grads[0].to(g.dtype)) for g in gradients
            )
        return *gradients, None, None, None, None, None


def loss(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    target_weight: Tensor,
    finish: Finish = finish,
    logits: int = LOSS_LOGITS,
    multiply: Multiply = multiply,
) -> tuple[Tensor, HeadStats]:
    """sum_i target_weight_i nll_i, differentiable in x and weight, and statistics per token.

    x [N, D], weight [V, D], targets [N], target_weight [N].
    """
    total, nll, entropy, log_sum = _Loss.apply(
        x, weight, targets, target_weight, finish, logits, multiply
    )
    return total, HeadStats(nll, entropy, logsumexp=log_sum)
