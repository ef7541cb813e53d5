"""Fires on a random fraction of positions.

The same ones in training, prefill and decode, whatever the batch.
"""

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
    """How often, and at which positions."""

    rate: Share = 0.4  # fraction of tokens that fire; the paper's gate fires on about 40 %
    # bounded, since `hash_uniform` multiplies it in 64 bits
    seed: Annotated[int, Meta(ge=-(2**30), le=2**30)] = 0


class Random(Gate[RandomOptions]):
    """Fires at random positions, whatever the token."""

    kind = "random"
    Options = RandomOptions
    by_position = True

    def __init__(self, width: int, options: RandomOptions, salt: int):
        super().__init__(width, options, salt)
        self.rate = options.rate
        self.salt = options.seed * 1_000_003 + salt

    def forward(self, evidence: Evidence) -> Verdict:
        score = hash_uniform(evidence.position, self.salt)
        return Verdict(score > self.threshold, score)

    @property
    def threshold(self) -> Tensor:
        return torch.tensor(1 - self.rate)

    def aim(self, rate: float | None) -> None:
        self.rate = self.options.rate if rate is None else rate


def hash_uniform(position: Tensor, salt: int | Tensor) -> Tensor:
    """A uniform number in [0, 1) per position, by hashing position and salt.

    Three rounds of multiply and shift, 32 bits.
    """
    bits = (position + 1 + salt * 7919) & MASK
    for shift in (16, 13, 15):
        bits = ((bits ^ (bits >> shift)) * PRIME) & MASK
    return (bits ^ (bits >> 16)).float() / 2**32
