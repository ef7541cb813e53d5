"""What the tied head says of hidden vectors: torch's products, and C++ for what is done to a tile while it is in the cache."""

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from amor.ops import native
from amor.ops.head import chunked
from amor.ops.head.reference import Reading

SOURCE = Path(__file__).with_suffix(".cpp")
READ_TILE = (3072, 2048)  # tokens and vocabulary of a tile: 25 MB
LOSS_LOGITS = 45_000_000  # logits of one tile of the loss: 180 MB, finished in place


def missing() -> str | None:
    return native.missing(SOURCE)


class Sums(chunked.Sums):
    def __init__(self, tokens: int, best: int, device: torch.device):
        super().__init__(tokens, best, device)
        self.total, self.weighted = self.total.double(), self.weighted.double()

    def take(self, z: Tensor, start: int) -> None:
        held = (native.pointer(t) for t in (self.m, self.total, self.weighted))
        best = ctypes.c_long(self.values.shape[1]), native.pointer(self.values), native.pointer(self.ids)
        native.library(SOURCE).take(native.pointer(z), *map(ctypes.c_long, (*z.shape, start)), *held, *best, native.threads())

    def logsumexp(self) -> Tensor:
        return super().logsumexp().float()

    def entropy(self) -> Tensor:
        return super().entropy().float()


def finish(z: Tensor, goal: Tensor, share: Tensor, gradient: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    nll, entropy, log_sum = (z.new_empty(len(z)) for _ in range(3))
    goal, share = goal.contiguous(), share.float().contiguous()
    tensors = [native.pointer(t) for t in (z, goal, share, nll, entropy, log_sum)]
    sizes = [ctypes.c_long(n) for n in z.shape]
    native.library(SOURCE).finish(tensors[0], *sizes, *tensors[1:3], int(gradient), *tensors[3:], native.threads())
    return nll, entropy, log_sum, z


def read(
    x: Tensor,
    weight: Tensor,
    targets: Tensor | None = None,
    entropy: bool = False,
    margin: bool = False,
    topk: int = 0,
    chosen: Tensor | None = None,
) -> Reading:
    return chunked.read(x, weight, targets, entropy, margin, topk, chosen, Sums, READ_TILE)


def loss(x: Tensor, weight: Tensor, targets: Tensor, share: Tensor) -> tuple[Tensor, Reading]:
    return chunked.loss(x, weight, targets, share, finish, LOSS_LOGITS)
