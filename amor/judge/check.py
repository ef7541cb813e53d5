"""The equivalence contract: however the same tokens are fed, a model says the same.

Every way of feeding is compared with the plain forward, for logits, gate decisions and final states. A decision may
differ only where its score lies within the tolerance of the threshold: those ties are counted and shown.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from amor.judge.feeding import WAYS, Feeder, Seen, alone
from amor.models.amor import Amor
from amor.models.block import Block
from amor.parts import ShortConv
from amor.state import KV, State

# relative to the largest number compared; a wrong mask or a lost window is off by more than 1e-2
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 5e-2}


@dataclass(frozen=True)
class Finding:
    """One way of feeding against the plain forward."""

    way: str
    logits: float  # largest difference, relative to the largest logit
    states: float  # the same for recurrent states, windows, keys and values; nan where the way has no final state
    flips: int  # gate decisions that differ although the score is clear of the threshold
    ties: int  # gate decisions that differ with the score at the threshold
    ok: bool


@torch.no_grad()
def stir(model: Amor, seed: int = 0) -> Amor:
    """Make an untrained model worth checking: weights that matter everywhere, blocks that speak, gates that fire."""
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight.normal_(0, module.in_features**-0.5, generator=generator)
        elif isinstance(module, ShortConv):
            module.weight.normal_(0, 0.5, generator=generator)
            if module.bias is not None:
                module.bias.normal_(0, 0.2, generator=generator)
        elif isinstance(module, Block):
            module.alpha.normal_(0, 1, generator=generator)
    model.embed.weight.normal_(0, 1, generator=generator)
    # a head that is sure of some tokens and unsure of others
    model.norm_f.weight.mul_(0.1)
    if model.final_norm is not None:
        model.final_norm.weight.mul_(0.1)
    for block in model.each_block():
        if block.norm is not None:
            block.norm.weight.mul_(0.1)
    calibrate(model, torch.randint(0, model.config.vocab, (4, 96), generator=generator))
    return model


@torch.no_grad()
def calibrate(model: Amor, tokens: Tensor) -> None:
    """Give every gate that has met no data its statistics from these tokens, block after block."""
    targets = tokens.roll(-1, 1)  # only the oracle looks at them
    for index, block in enumerate(model.each_block()):
        if int(getattr(block.gate, "updates", torch.ones(()))) == 0:
            block.gate.observe(model(tokens, targets=targets).gates[index].score)


@torch.no_grad()
def check(model: Amor, length: int = 80, rows: int = 4, seed: int = 0) -> list[Finding]:
    """Every way of feeding against the plain forward, on random tokens."""
    model.eval()
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, model.config.vocab, (rows, length), generator=generator)
    lengths = [length, *torch.randint(3, length, (rows - 1,), generator=generator).tolist()]
    feeder = Feeder(model, tokens, lengths, seed)
    plain = alone(feeder)
    return [_compare(name, plain, way(feeder), model) for name, way in WAYS.items()]


def _compare(way: str, plain: list[Seen], found: list[Seen], model: Amor) -> Finding:
    tolerance = TOLERANCE[model.embed.weight.dtype]
    logits = max(_apart(a.logits, b.logits) for a, b in zip(plain, found, strict=True))
    states = [_states_apart(a.state, b.state) for a, b in zip(plain, found, strict=True) if a.state and b.state]
    flips = ties = 0
    for a, b in zip(plain, found, strict=True):
        for k, block in enumerate(model.each_block()):
            differ = a.fires[k] != b.fires[k]
            near = (a.scores[k] - block.gate.threshold).abs() <= tolerance
            ties += int((differ & near).sum())
            flips += int((differ & ~near).sum())
    worst = max(states) if states else float("nan")
    # a decision at the threshold may fall either way, and then the numbers after it differ by right
    ok = flips == 0 and (ties > 0 or (logits <= tolerance and not worst > tolerance))
    return Finding(way, logits, worst, flips, ties, ok)


def _apart(a: Tensor, b: Tensor) -> float:
    if a.shape != b.shape:
        return float("inf")
    if not a.numel():
        return 0.0
    gap = ((a - b).abs().max() / a.abs().max().clamp(min=1e-6)).item()
    return gap if gap == gap else float("inf")


def _states_apart(a: State, b: State) -> float:
    if not torch.equal(a.position, b.position):
        return float("inf")
    length, worst = int(a.position[0]), 0.0
    for mine, theirs in zip(a.parts, b.parts, strict=True):
        for name, held in mine.items():
            other = theirs[name]
            if isinstance(held, KV) and isinstance(other, KV):
                pairs = [(held.k, other.k), (held.v, other.v)]
                worst = max(worst, *(_apart(x[:, :, :length], y[:, :, :length]) for x, y in pairs))
            elif isinstance(held, Tensor) and isinstance(other, Tensor):
                worst = max(worst, _apart(held, other))
    return worst
