"""The optimiser: frozen parts, parameter groups, AdamW, and the learning rate as a function of the
step.

AdamW with decay on matrices only, and alpha in a group of its own. No decay on norms, biases,
A_log, D, dt_bias, alpha and the scales of fused branches: all of them are vectors, and all other
parameters (projections, convolutions, the embedding and an untied head) are not. So the number of
dimensions decides.

A frozen part has no gradient, no moments and no decay, and stays as it is to the bit.
"""

import math
from dataclasses import dataclass

import torch
from torch import nn

from amor.errors import AmorError
from amor.train.recipe import Optimiser, Rates

Named = list[tuple[str, nn.Parameter]]
# value of Recipe.freeze -> prefixes of the names of frozen parameters
FROZEN: dict[str, tuple[str, ...]] = {
    "none": (),
    "backbone": ("embed.", "backbone.", "norm_f.", "head."),
}


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters that share a learning rate and weight decay."""

    name: str  # "matrices", "vectors" or "alpha"
    peak: float  # learning rate at the peak of the schedule
    decay: float  # weight decay
    members: Named  # (name in the model, parameter)


def freeze(model: nn.Module, what: str) -> None:
    """Freeze a part (a key of FROZEN); an error if nothing is left to train."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(FROZEN[what]))
    if not any(p.requires_grad for p in model.parameters()):
        raise AmorError(f'freeze = "{what}" leaves nothing to train: the model has no gated blocks')


def groups(model: nn.Module, optimiser: Optimiser, rates: Rates) -> list[ParameterGroup]:
    """Every trained parameter in exactly one group; empty groups are left out."""
    every = {
        "matrices": ParameterGroup("matrices", rates.peak, optimiser.weight_decay, []),
        "vectors": ParameterGroup("vectors", rates.peak, 0.0, []),
        "alpha": ParameterGroup("alpha", rates.alpha, 0.0, []),
    }
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            every[kind(name, parameter)].members.append((name, parameter))
    return [group for group in every.values() if group.members]


def kind(name: str, parameter: nn.Parameter) -> str:
    """The name of a parameter's group."""
    if name.startswith("blocks.") and name.endswith(".alpha"):
        return "alpha"
    return "matrices" if parameter.ndim >= 2 else "vectors"


def adamw(trained: list[ParameterGroup], optimiser: Optimiser) -> torch.optim.AdamW:
    """AdamW over the groups; learning rates are 0 until set_rate."""
    sets = [
        {
            "params": [p for _, p in group.members],
            "lr": 0.0,
            "peak": group.peak,
            "weight_decay": group.decay,
            "name": group.name,
        }
        for group in trained
    ]
    return torch.optim.AdamW(sets, betas=optimiser.betas, eps=optimiser.eps, fused=True)


def shape(step: int, steps: int, rates: Rates) -> float:
    """Factor of every peak learning rate in a step (the first is 0): a linear warm-up to 1, then a
    cosine to floor / peak in the last step.

    alpha follows the same shape from its own peak, so the ratio of the two learning rates never
    changes.
    """
    if step < rates.warmup:
        return (step + 1) / rates.warmup
    low = rates.floor / rates.peak
    progress = (step - rates.warmup + 1) / max(steps - rates.warmup, 1)  # in (0, 1]
    return low + (1 - low) * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))


def set_rate(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Set every group's learning rate to its peak times `factor` (of `shape`)."""
    for group in optimizer.param_groups:
        group["lr"] = group["peak"] * factor


def describe(model: nn.Module, trained: list[ParameterGroup]) -> list[str]:
    """One line of text per group, and one for the frozen tensors if there are any."""
    rows = [
        (g.name, [p for _, p in g.members], f"peak lr {g.peak:g}, weight decay {g.decay:g}")
        for g in trained
    ]
    frozen = [p for p in model.parameters() if not p.requires_grad]
    if frozen:
        rows.append(("frozen", frozen, "no gradient, no moments, no decay"))
    return [
        f"{name:<9} {len(tensors):>4} tensors {sum(p.numel() for p in tensors):>14,} parameters"
        f"   {what}"
        for name, tensors, what in rows
    ]
