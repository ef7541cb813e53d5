"""What a model was when it was compiled, so that steps never run from weights, layers or hooks that are no longer its own.

Before every step: whether a weight changed (torch counts changes in place) or lies elsewhere, and whether anywhere in the process
a hook was made or a module or parameter was put into another since; only then, and when a session begins, is the whole model
compared. After a step the caches hold weights and little else, so looking at every module every time would cost a twentieth of
a fast step. What torch does not count cannot be seen at once: `parameter.data.mul_(2)` never (`Engine.repack` is there for that),
a `forward` put on an instance when the next session begins.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import nn
from torch.nn.modules import module as registry
from torch.utils.hooks import RemovableHandle


class _Registrations:
    """How often a module or parameter was put into a module, in this process."""

    count = 0

    def __call__(self, *what: Any) -> None:
        _Registrations.count += 1


@cache
def _counting() -> None:
    registry.register_module_module_registration_hook(_Registrations())
    registry.register_module_parameter_registration_hook(_Registrations())


def _now() -> tuple[int, int]:
    return RemovableHandle.next_id, _Registrations.count


class Seal:
    def __init__(self, model: nn.Module):
        _counting()
        self.model, self.whole, self.weights = model, _whole(model), list(model.parameters())
        self.state, self.seen = self._state(), _now()

    def _state(self) -> list[tuple[int, int]]:
        return [(weight._version, weight.data_ptr()) for weight in self.weights]

    def broken(self, begins: bool = False) -> str:
        """What has changed since, or nothing. begins: a session does, so look at everything."""
        if self._state() != self.state:
            return "weights changed"
        if begins or _now() != self.seen:
            if _whole(self.model) != self.whole:
                return "layers or hooks changed"
            self.seen = _now()
        return ""


def _whole(model: nn.Module) -> list[object]:
    """Every module and parameter by identity, and how each module is watched."""
    found: list[object] = []
    for module in model.modules():
        found += [id(module), *map(id, module._parameters.values())]
        found += [len(module._forward_hooks), len(module._forward_pre_hooks), "forward" in module.__dict__]
    return found
