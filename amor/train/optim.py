"""Parameter groups and the optimiser: AdamW with decay on matrices only, and alpha in a group of
its own.

No decay on norms, biases, A_log, D, dt_bias, alpha and the scales of fused branches: all of them
are vectors, and all other parameters (projections, convolutions, the embedding and an untied head)
are not. So the number of dimensions decides.
"""

from dataclasses import dataclass

import torch
from torch import nn

from amor.train.recipe import Optimiser, Rates

Named = list[tuple[str, nn.Parameter]]


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters that share a learning rate and weight decay."""

    name: str  # "matrices", "vectors" or "alpha"
    peak: float  # learning rate at the peak of the schedule
    decay: float  # weight decay
    members: Named  # (name in the model, parameter)


def groups(model: nn.Module, optimiser: Optimiser, rates: Rates) -> list[ParameterGroup]:
    """Every trained parameter in exactly one group; empty groups are left out."""
    sorted_out: dict[str, Named] = {"matrices": [], "vectors": [], "alpha": []}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            sorted_out[kind(name, parameter)].append((name, parameter))
    found = [
        ParameterGroup("matrices", rates.peak, optimiser.weight_decay, sorted_out["matrices"]),
        ParameterGroup("vectors", rates.peak, 0.0, sorted_out["vectors"]),
        ParameterGroup("alpha", rates.alpha, 0.0, sorted_out["alpha"]),
    ]
    return [group for group in found if group.members]


def kind(name: str, parameter: nn.Parameter) -> str:
    """The name of a parameter's group."""
    if name.startswith("blocks.") and name.endswith(".alpha"):
        return "alpha"
    return "matrices" if parameter.ndim >= 2 else "vectors"


def adamw(found: list[ParameterGroup], optimiser: Optimiser) -> torch.optim.AdamW:
    """AdamW over the groups; learning rates are 0 until set_rate."""
    sets = [
        {
            "params": [p for _, p in group.members],
            "lr": 0.0,
            "peak": group.peak,
            "weight_decay": group.decay,
            "name": group.name,
        }
        for group in found
    ]
    return torch.optim.AdamW(sets, betas=optimiser.betas, eps=optimiser.eps, fused=True)


def set_rate(optimizer: torch.optim.Optimizer, shape: float) -> None:
    """Set every group's learning rate to its peak times `shape` (schedule.py)."""
    for group in optimizer.param_groups:
        group["lr"] = group["peak"] * shape


def describe(found: list[ParameterGroup]) -> list[str]:
    """One line of text per group."""
    return [
        f"{group.name:<9} "
        f"{len(group.members):>4} tensors {sum(p.numel() for _, p in group.members):>14,} "
        "parameters"
        f"   peak lr {group.peak:g}, weight decay {group.decay:g}"
        for group in found
    ]
