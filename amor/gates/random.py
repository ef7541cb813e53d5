"""Fires on a random share of positions; the same ones in training, prefill and decode, whatever the batch."""

from dataclasses import dataclass
from typing import Annotated

import torch
from msgspec import Meta
from torch import Tensor

from amor.gates.base import Evidence, Gate, Verdict
from amor.typed import Share

PRIME, MASK = 0x9E3779B1, 0xFFFFFFFF


@dataclass(frozen=True)
class RandomOptions:
    rate: Share = 0.4
    seed: Annotated[int, Meta(ge=-(2**30), le=2**30)] = 0  # `spread` multiplies it by a number of 33 bits, in 64


class Random(Gate[RandomOptions]):
    kind = "random"
    Options = RandomOptions

    def __init__(self, width: int, options: RandomOptions, salt: int):
        super().__init__(width, options, salt)
        self.rate = options.rate
        self.salt = options.seed * 1_000_003 + salt

    def forward(self, evidence: Evidence) -> Verdict:
        score = spread(evidence.position, self.salt)
        return Verdict(score > self.threshold, score)

    @property
    def threshold(self) -> Tensor:
        return torch.tensor(1 - self.rate)

    def aim(self, rate: float | None) -> None:
        self.rate = self.options.rate if rate is None else rate


def spread(position: Tensor, salt: int | Tensor) -> Tensor:
    """A number in [0, 1) that looks random, from a position and a salt: three rounds of multiply and shift on 32 bits."""
    bits = (position + 1 + salt * 7919) & MASK
    for shift in (16, 13, 15):
        bits = ((bits ^ (bits >> shift)) * PRIME) & MASK
    return (bits ^ (bits >> 16)).float() / 2**32
