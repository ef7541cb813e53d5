"""Whether gradients arrive: after the first steps of a run with frozen parts every trained tensor
must have had one.

W_O of a gated block starts at 0, so in the first step it alone has a gradient that is not 0: what
stands before it (W_Q, W_K, W_V, alpha, the norms) is multiplied by it and waits. Once W_O has
moved, all must have one. A layer that is bypassed, or a block whose gate never fires, is detected
here and not after the run.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

STEPS = 3  # updates after which a tensor without a gradient is reported


class GradientCheck:
    """Collects, over the first steps, which trained tensors have had a gradient."""

    def __init__(self, model: nn.Module, full_tensor: Callable[[Tensor], Tensor]):
        """full_tensor: World.full_tensor."""
        self.full_tensor = full_tensor
        self.names = [name for name, p in model.named_parameters() if p.requires_grad]
        self.silent = list(self.names)  # no gradient that is not 0 yet
        self.missing: list[str] = []  # no gradient at all in the last step

    def look(self, model: nn.Module) -> None:
        """Take in the gradients of a step, before they are cleared."""
        gradients = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
        self.missing = [name for name in self.names if gradients[name] is None]
        self.silent = [name for name in self.silent if not self._moved(gradients[name])]

    def _moved(self, gradient: Tensor | None) -> bool:
        return gradient is not None and bool(self.full_tensor(gradient).any())

    def summary(self, step: int) -> str:
        """The result so far, in one line."""
        count = len(self.names)
        start = f"gradients: step {step}:"
        if self.missing:
            names = _few(self.missing)
            return f"{start} none at all for {names}; these tensors take no part in the loss"
        if not self.silent:
            return f"{start} every one of {count} trained tensors has received one that is not 0"
        if step >= STEPS:
            return f"{start} still 0 for {_few(self.silent)}; did their gate fire?"
        moved = [name for name in self.names if name not in self.silent]
        return (
            f"{start} {count} of {count} trained tensors have one, {len(moved)} of them not 0 "
            f"({_few(moved)}); the others wait for W_O, which starts at 0"
        )


def _few(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
