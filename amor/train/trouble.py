"""What can go wrong in a step: numbers that are not finite, gradient spikes, and trained tensors
without a gradient.
"""

import statistics
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from amor.errors import AmorError

HISTORY = 100  # gradient norms kept
ENOUGH = 20  # norms needed before one can be called a spike
STEPS = 3  # updates after which a tensor without a gradient is reported


class NonFiniteError(AmorError):
    """A loss or gradient that is not finite, detected before the optimiser changed anything."""

    def __init__(self, step: int, loss: float, norm: float):
        """step: the first is 0; messages count from 1, as metrics do."""
        super().__init__(f"step {step + 1}: loss is {loss}, gradient norm is {norm}")
        self.step, self.loss, self.norm = step, loss, norm


class Spikes:
    """Detects gradient norms far above the median of the recent ones."""

    def __init__(self, factor: float, norms: Iterable[float] = ()):
        """factor: times the median that makes a spike; 0 detects none. norms: recent ones, of a
        resumed run.
        """
        self.factor = factor
        self.norms = deque(norms, maxlen=HISTORY)

    def is_spike(self, norm: float) -> bool:
        """Whether this norm is a spike. It is kept either way, so that a lasting change stops being
        one.
        """
        recent = list(self.norms)
        self.norms.append(norm)
        enough = self.factor > 0 and len(recent) >= ENOUGH
        return enough and norm > self.factor * statistics.median(recent)


class GradientCheck:
    """Checks, over the first steps of a run with frozen parts, that every trained tensor gets a
    gradient.

    W_O of a gated block starts at 0, so in the first step it alone has a gradient that is not 0:
    what comes before it (W_Q, W_K, W_V, alpha, the norms) is multiplied by it. Once W_O has moved,
    all must have one. A layer that is bypassed, or a block whose gate never fires, is detected here
    and not after the run.
    """

    def __init__(self, model: nn.Module, full_tensor: Callable[[Tensor], Tensor]):
        """full_tensor: World.full_tensor."""
        self.full_tensor = full_tensor
        self.names = [name for name, p in model.named_parameters() if p.requires_grad]
        self.silent = list(self.names)  # no gradient that is not 0 yet
        self.missing: list[str] = []  # no gradient at all in the last step

    def update(self, model: nn.Module) -> None:
        """Take in the gradients of a step, before they are cleared."""
        gradients = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
        self.missing = [name for name in self.names if gradients[name] is None]
        self.silent = [
            name
            for name in self.silent
            if (gradient := gradients[name]) is None or not self.full_tensor(gradient).any()
        ]

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


def first_non_finite(
    model: nn.Module, forward: Callable[[], Any], full_tensor: Callable[[Tensor], Tensor]
) -> str:
    """The place of the first number that is not finite: a parameter, a module's output, or a
    gradient.

    forward: runs the failed batch again. full_tensor: World.full_tensor.
    """
    for name, parameter in model.named_parameters():
        if not all_finite(full_tensor(parameter)):
            return f"parameter {name}"
    module = first_non_finite_output(model, forward)
    if module:
        return f"output of {module}"
    # gradients flow from the last parameter to the first, so the first to go wrong is the last in
    # order
    wrong = [
        name
        for name, p in model.named_parameters()
        if p.grad is not None and not all_finite(full_tensor(p.grad))
    ]
    return f"gradient of {wrong[-1]}" if wrong else "the loss itself"


def first_non_finite_output(model: nn.Module, forward: Callable[[], Any]) -> str | None:
    """The first module, in the order of execution, whose output is not finite."""
    wrong: list[str] = []

    def watch(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            outputs = output if isinstance(output, tuple) else (output,)
            tensors = [t for t in outputs if isinstance(t, Tensor) and t.is_floating_point()]
            if not all(all_finite(t) for t in tensors):
                wrong.append(name)

        return hook

    modules = [(name, module) for name, module in model.named_modules() if name]
    hooks = [module.register_forward_hook(watch(name)) for name, module in modules]
    try:
        forward()
    finally:
        for hook in hooks:
            hook.remove()
    return wrong[0] if wrong else None


def all_finite(t: Tensor) -> bool:
    """Whether a tensor holds neither NaN nor infinity."""
    return bool(torch.isfinite(t.detach()).all())
