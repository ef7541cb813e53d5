"""Random weights and gate statistics under which a wrong computation shows in `amor check`."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from amor.gates.router import Router
from amor.mixers.mamba2 import Mamba2
from amor.models.amor import Amor
from amor.models.block import Block
from amor.models.gated import PassOptions
from amor.parts import ShortConv

MOST_UPDATES = 16  # forward passes at most that a gate which learns from measured gains is shown


@torch.no_grad()
def randomise_for_test(model: Amor, seed: int = 0) -> Amor:
    """Draw weights such that every one matters, no two are alike and gates fire at times."""
    generator = torch.Generator().manual_seed(seed)
    # logits get a std of about 2, and layers add more than the embedding holds: else every token
    # would predict itself
    model.embed.weight.normal_(0, 2 * model.config.width**-0.5, generator=generator)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            std = 2.0 if module is model.head else 1.0
            module.weight.normal_(0, std * module.in_features**-0.5, generator=generator)
        elif isinstance(module, ShortConv):
            module.weight.normal_(0, 0.5, generator=generator)
            if module.bias is not None:
                module.bias.normal_(0, 0.2, generator=generator)
        elif isinstance(module, Block):
            module.alpha.normal_(0, 1, generator=generator)
        elif isinstance(module, Router):
            for t in module.network():
                t.normal_(0, t.shape[-1] ** -0.5, generator=generator)
    for name, parameter in model.named_parameters():
        if name.endswith(("norm.weight", "norm_f.weight", "_scale", ".D")):
            parameter.log_normal_(0, 0.3, generator=generator)
        elif name.endswith("q_proj.weight"):
            parameter.mul_(2)  # queries that prefer some keys to others
        elif name.startswith("backbone.") and name.endswith(
            ("out_proj.weight", "o_proj.weight", "down_proj.weight")
        ):
            parameter.mul_(0.7)  # layers that do not enlarge each other's rounding
    for module in model.modules():
        if hasattr(module, "dt_bias"):
            _randomise_steps(module, generator)
    calibrate(model, torch.randint(0, model.config.vocab, (4, 96), generator=generator))
    return model


def _randomise_steps(mixer: Any, generator: torch.Generator) -> None:
    """Step sizes from near 0 to beyond 20, where softplus is linear; short and long memories."""
    mixer.dt_bias.uniform_(-5, 3, generator=generator)
    mixer.dt_bias[::8] = 21
    step = F.softplus(mixer.dt_bias).view(len(mixer.A_log), -1).mean(1)  # per head
    mixer.A_log.uniform_(-4, 1, generator=generator).sub_(step.log())
    # takes in dt times what it reads, and no head may drown the others in the norm they share
    if isinstance(mixer, Mamba2):
        reads = mixer.conv1d.weight[: mixer.inner].view(len(step), -1)
        reads.div_(step.clamp(min=1)[:, None])


@torch.no_grad()
def calibrate(model: Amor, tokens: Tensor) -> None:
    """Initialise gates that have no statistics from tokens [B, T], block after block."""
    targets = tokens.roll(-1, 1)  # only gates that use gains read them
    for _ in range(MOST_UPDATES):
        if all(block.gate.settled() for block in model.each_block()):
            break
        every = torch.arange(tokens.shape[1]).expand_as(tokens)
        options = PassOptions(measure=every)
        model.learn(model(tokens, targets=targets, options=options).measured)
    for index, block in enumerate(model.each_block()):
        if int(getattr(block.gate, "updates", torch.ones(()))) == 0:
            block.gate.observe(model(tokens, targets=targets).gates[index].score)
