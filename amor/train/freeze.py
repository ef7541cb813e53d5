"""What of a model is not trained: it gets no gradient, no moments and no decay, and stays as it is to the bit."""

from __future__ import annotations

from torch import nn

from amor.errors import AmorError

# by word of the recipe: how the names of such parameters begin
PARTS: dict[str, tuple[str, ...]] = {"none": (), "backbone": ("embed.", "backbone.", "norm_f.", "head.")}


def freeze(model: nn.Module, what: str) -> None:
    """Freeze a part; what is left must be something."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(PARTS[what]))
    if not any(p.requires_grad for p in model.parameters()):
        raise AmorError(f'freeze = "{what}" leaves nothing to train: the model has no gated blocks')


def trained(model: nn.Module) -> int:
    """How many numbers are trained."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def described(model: nn.Module) -> list[str]:
    """The line of the frozen tensors, where there are any."""
    held = [p for p in model.parameters() if not p.requires_grad]
    numbers = sum(p.numel() for p in held)
    return [f"{'frozen':<9} {len(held):>4} tensors {numbers:>14,} parameters   no gradient, no moments, no decay"] if held else []
