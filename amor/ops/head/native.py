"""Statistics and loss of the head: torch's products, and C++ for what follows in cache."""

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from amor.ops import native
from amor.ops.head import chunked
from amor.ops.head.reference import HeadStats
from amor.ops.linear import alone
from amor.ops.linear import native as products

SOURCE = Path(__file__).with_suffix(".cpp")
READ_TILE = (3072, 2048)  # tokens and vocabulary of a tile: 25 MB
FEW = 32  # tokens: below, packing the head costs more than it gives
LOSS_LOGITS = 45_000_000  # logits of one tile of the loss: 180 MB, finished in place


def missing() -> str | None:
    """Why this backend cannot run here (no compiler, say), or None."""
    return native.missing(SOURCE)


@cache
def library() -> ctypes.CDLL:
    """The compiled library."""
    return native.library(SOURCE)


class NativeSums(chunked.Sums):
    """The running sums in C++, in float64."""

    def __init__(self, tokens: int, best: int, device: torch.device):
        super().__init__(tokens, best, device)
        self.m, self.total, self.weighted = (
            t.double() for t in (self.m, self.total, self.weighted)
        )

    def take(self, z: Tensor, start: int) -> None:
        """As Sums.take."""
        sums = (native.pointer(t) for t in (self.m, self.total, self.weighted))
        best = (
            ctypes.c_long(self.values.shape[1]),
            native.pointer(self.values),
            native.pointer(self.ids),
        )
        library().take(
            native.pointer(z),
            *map(ctypes.c_long, (*z.shape, start)),
            *sums,
            *best,
            native.threads(),
        )

    def logsumexp(self) -> Tensor:
        """As Sums.logsumexp, in float32."""
        return super().logsumexp().float()

    def entropy(self) -> Tensor:
        """As Sums.entropy, in float32."""
        return super().entropy().float()


def finish(
    z: Tensor, goal: Tensor, target_weight: Tensor, gradient: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """As chunked.finish; z is overwritten and returned as p."""
    nll, entropy, log_sum, scale = (z.new_empty(len(z)) for _ in range(4))
    goal, target_weight = goal.contiguous(), target_weight.float().contiguous()
    tensors = [native.pointer(t) for t in (z, goal, target_weight, nll, entropy, log_sum, scale)]
    sizes = [ctypes.c_long(n) for n in z.shape]
    library().finish(
        tensors[0], *sizes, *tensors[1:3], int(gradient), *tensors[3:], native.threads()
    )
    return nll, entropy, log_sum, z, scale


def read(
    x: Tensor,
    weight: Tensor,
    targets: Tensor | None = None,
    entropy: bool = False,
    margin: bool = False,
    topk: int = 0,
) -> HeadStats:
    """As the reference."""
    ours = x.dtype == weight.dtype == torch.float32 and (alone() or x.shape[0] >= FEW)
    if ours and targets is None and not margin and not topk:
        return sums_only(x, weight, entropy)
    multiply = products.multiply if ours and alone() else chunked.multiply
    return chunked.read(x, weight, targets, entropy, margin, topk, NativeSums, READ_TILE, multiply)


@torch.no_grad()
def sums_only(x: Tensor, weight: Tensor, entropy: bool) -> HeadStats:
    """Entropy and logsumexp by products in C++: no logit is ever written to memory."""
    x, weight = x if x.stride(1) == 1 else x.contiguous(), weight.contiguous()
    log_sum, nats = x.new_empty(x.shape[0]), x.new_empty(x.shape[0])
    sizes = (
        [ctypes.c_long(n) for n in (x.shape[0], x.stride(0))],
        [ctypes.c_long(n) for n in weight.shape],
    )
    memory = native.pointer(log_sum), native.pointer(nats), native.threads()
    library().read(native.pointer(x), *sizes[0], native.pointer(weight), *sizes[1], *memory)
    return HeadStats(entropy=nats if entropy else None, logsumexp=log_sum)


def loss(
    x: Tensor, weight: Tensor, targets: Tensor, target_weight: Tensor
) -> tuple[Tensor, HeadStats]:
    """As the reference."""
    # what `finish` leaves in z may be as large as the vocabulary: too large for 16 bits
    if x.dtype != torch.float32 or weight.dtype != torch.float32:
        return chunked.loss(x, weight, targets, target_weight)
    return chunked.loss(
        x if x.stride(1) == 1 else x.contiguous(),
        weight,
        targets,
        target_weight,
        finish,
        LOSS_LOGITS,
        products.multiply,
    )
