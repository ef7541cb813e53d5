"""Detects changes of a model since its steps were compiled: weights, layers and hooks.

Before every step: whether a weight changed (torch counts in-place changes) or moved, and whether a
hook, module or parameter was registered anywhere in the process; only then, and when a session
begins, is the whole model compared. After a step the caches hold little but weights, so visiting
every module at every step would cost a twentieth of a fast step. What torch does not count cannot
be detected at once: `parameter.data.mul_(2)` never (call `Engine.repack`), a `forward` assigned to
an instance when the next session begins.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import nn
from torch.nn.modules import module as registry
from torch.utils.hooks import RemovableHandle


class _Registrations:
    """How often a module or parameter was registered in this process."""

    count = 0

    def __call__(self, *_: Any) -> None:
        _Registrations.count += 1


@cache
def _count_registrations() -> None:
    registry.register_module_module_registration_hook(_Registrations())
    registry.register_module_parameter_registration_hook(_Registrations())


def _registrations() -> tuple[int, int]:
    return RemovableHandle.next_id, _Registrations.count


class ModelFingerprint:
    """The state of a model when it was compiled."""

    def __init__(self, model: nn.Module):
        _count_registrations()
        self.model, self.structure = model, _structure(model)
        self.weights = list(model.parameters())
        self.versions, self.registrations = self._versions(), _registrations()

    def _versions(self) -> list[tuple[int, int]]:
        return [(weight._version, weight.data_ptr()) for weight in self.weights]

    def changed(self, full: bool = False) -> str:
        """What has changed since, or an empty string; full: compare all layers and hooks."""
        if self._versions() != self.versions:
            return "weights changed"
        if full or _registrations() != self.registrations:
            if _structure(self.model) != self.structure:
                return "layers or hooks changed"
            self.registrations = _registrations()
        return ""


def _structure(model: nn.Module) -> list[object]:
    """Every module and parameter by identity, and the hooks of each module."""
    parts: list[object] = []
    for module in model.modules():
        parts += [id(module), *map(id, module._parameters.values())]
        parts += [len(module._forward_hooks), len(module._forward_pre_hooks)]
        parts.append("forward" in module.__dict__)
    return parts
