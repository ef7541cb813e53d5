"""Which tokens of a training step have their gain measured: one of every 64 columns of each row.

Which one is a function of seed, step and row of the global batch, so micro-batches and ranks have
no part in it. A measured token costs, besides its own step, the queries of the blocks and two head
passes (two per block where each decides for itself), without gradient: 2 / 64 of a head pass per
token where a step costs three, about 1 % of it. docs/log.md has the measurement.
"""

import torch
from torch import Tensor

from amor.gates.random import MASK, hash_uniform

EVERY = 64  # columns per measured token


def sampled(seed: int, step: int, rows: range, batch: int, context: int) -> Tensor:
    """[rows, S] columns to measure, one per EVERY, for some rows of the global batch of a step."""
    first = torch.arange(0, context, EVERY)
    width = (context - first).clamp(max=EVERY)
    number = (step * batch + torch.tensor(rows))[:, None] * len(first) + torch.arange(len(first))
    return first + (hash_uniform(number, seed & MASK) * width).long().clamp(max=width - 1)
