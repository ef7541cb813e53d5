"""What goes wrong in a step: numbers that are not finite, gradients that spike; found, named, and kept for replay."""

import statistics
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from amor.errors import AmorError

HISTORY, ENOUGH = 100, 20  # gradient norms remembered, and how many are needed before one can be called a spike


class NonFiniteError(AmorError):
    """A loss or gradient that is not finite, found before the optimiser touched anything."""

    def __init__(self, step: int, loss: float, norm: float):
        super().__init__(f"step {step + 1}: loss is {loss}, gradient norm is {norm}")
        self.step, self.loss, self.norm = step, loss, norm


class Spikes:
    """Tells a gradient norm far above the median of the last ones."""

    def __init__(self, factor: float, norms: Iterable[float] = ()):
        self.factor = factor
        self.norms = deque(norms, maxlen=HISTORY)

    def meets(self, norm: float) -> bool:
        """Whether this norm is a spike. It is remembered either way, so that a lasting change stops being one."""
        known = list(self.norms)
        self.norms.append(norm)
        return self.factor > 0 and len(known) >= ENOUGH and norm > self.factor * statistics.median(known)


def first_non_finite(model: nn.Module, forward: Callable[[], Any], full_tensor: Callable[[Tensor], Tensor]) -> str:
    """Where the first number that is not finite stands: a parameter, a module's output, or else a gradient."""
    for name, parameter in model.named_parameters():
        if not all_finite(full_tensor(parameter)):
            return f"parameter {name}"
    found = first_non_finite_output(model, forward)
    if found:
        return f"output of {found}"
    # gradients flow from the last parameter to the first, so the first to go wrong is the last in order
    wrong = [name for name, p in model.named_parameters() if p.grad is not None and not all_finite(full_tensor(p.grad))]
    return f"gradient of {wrong[-1]}" if wrong else "the loss itself"


def first_non_finite_output(model: nn.Module, forward: Callable[[], Any]) -> str | None:
    """The first module, in the order of the walk, that returns something not finite."""
    found: list[str] = []

    def look(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, given: Any, output: Any) -> None:
            tensors = output if isinstance(output, tuple) else (output,)
            if not all(all_finite(t) for t in tensors if isinstance(t, Tensor) and t.is_floating_point()):
                found.append(name)

        return hook

    hooks = [module.register_forward_hook(look(name)) for name, module in model.named_modules() if name]
    try:
        forward()
    finally:
        for hook in hooks:
            hook.remove()
    return found[0] if found else None


def all_finite(t: Tensor) -> bool:
    return bool(torch.isfinite(t.detach()).all())
