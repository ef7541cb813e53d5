"""The equivalence contract: however the same tokens are fed, a model says the same.

Every way of feeding is compared with the plain forward, for logits, gate decisions and final states. A decision may
differ only where its score lies within the tolerance of the threshold: those ties are counted and shown.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from amor.mixers.mamba2 import Mamba2
from amor.models.amor import Amor
from amor.models.block import Block
from amor.models.feeding import WAYS, Feeder, Seen, alone
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
    """Make an untrained model worth checking: every weight matters, no two are alike, gates fire now and then."""
    generator = torch.Generator().manual_seed(seed)
    # logits have a spread of about 2, and layers add more than the embedding holds: else every token would predict itself
    model.embed.weight.normal_(0, 2 * model.config.width**-0.5, generator=generator)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight.normal_(0, module.in_features**-0.5, generator=generator)
        elif isinstance(module, ShortConv):
            module.weight.normal_(0, 0.5, generator=generator)
            if module.bias is not None:
                module.bias.normal_(0, 0.2, generator=generator)
        elif isinstance(module, Block):
            module.alpha.normal_(0, 1, generator=generator)
    for name, parameter in model.named_parameters():
        if name.endswith(("norm.weight", "norm_f.weight", "_scale", ".D")):
            parameter.log_normal_(0, 0.3, generator=generator)
        elif name.endswith("q_proj.weight"):
            parameter.mul_(2)  # queries that prefer some keys to others
        elif name.startswith("backbone.") and name.endswith(("out_proj.weight", "o_proj.weight", "down_proj.weight")):
            parameter.mul_(0.7)  # layers that do not enlarge each other's rounding
    for module in model.modules():
        if hasattr(module, "dt_bias"):
            _stir_steps(module, generator)
    calibrate(model, torch.randint(0, model.config.vocab, (4, 96), generator=generator))
    return model


def _stir_steps(mixer: Any, generator: torch.Generator) -> None:
    """Steps of a recurrence from hardly any to beyond 20, where softplus is a straight line; memories short and long."""
    mixer.dt_bias.uniform_(-5, 3, generator=generator)
    mixer.dt_bias[::8] = 21
    step = F.softplus(mixer.dt_bias).view(len(mixer.A_log), -1).mean(1)  # of a head
    mixer.A_log.uniform_(-4, 1, generator=generator).sub_(step.log())
    if isinstance(mixer, Mamba2):  # takes in dt times what it reads, and no head may drown the others in the norm they share
        reads = mixer.conv1d.weight[: mixer.inner].view(len(step), -1)
        reads.div_(step.clamp(min=1)[:, None])


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
