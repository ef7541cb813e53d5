"""Frozen parts of a model: no gradient, no moments, no decay; they stay as they are to the bit."""

from __future__ import annotations

from torch import nn

from amor.errors import AmorError

# value of Recipe.freeze -> prefixes of the names of frozen parameters
PARTS: dict[str, tuple[str, ...]] = {
    "none": (),
    "backbone": ("embed.", "backbone.", "norm_f.", "head."),
}


def freeze(model: nn.Module, what: str) -> None:
    """Freeze a part (a key of PARTS); an error if nothing is left to train."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(PARTS[what]))
    if not any(p.requires_grad for p in model.parameters()):
        raise AmorError(f'freeze = "{what}" leaves nothing to train: the model has no gated blocks')


def trained(model: nn.Module) -> int:
    """The number of trained parameters."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def described(model: nn.Module) -> list[str]:
    """One line of text about the frozen tensors, if there are any."""
    frozen = [p for p in model.parameters() if not p.requires_grad]
    numbers = sum(p.numel() for p in frozen)
    if not frozen:
        return []
    size = f"{len(frozen):>4} tensors {numbers:>14,} parameters"
    return [f"{'frozen':<9} {size}   no gradient, no moments, no decay"]
