"""What a model was when it was compiled, so that a step never runs from weights, layers or hooks that are no longer its own.

Watched are the module tree, the parameters (which tensor, where it lies, and torch's count of changes in place) and hooks.
A change that torch does not count (`parameter.data.mul_(2)`) cannot be seen; `Engine.repack` is there for whoever does that.
"""

from torch import nn


class Seal:
    def __init__(self, model: nn.Module):
        self.children: list[tuple[dict, str, nn.Module | None]] = []
        self.weights: list[tuple[dict, str, nn.Parameter, int, int]] = []
        self.hooks: list[tuple[nn.Module, int]] = []
        for module in model.modules():
            self.children += [(module._modules, name, child) for name, child in module._modules.items()]
            for name, weight in module._parameters.items():
                if weight is not None:
                    self.weights.append((module._parameters, name, weight, weight._version, weight.data_ptr()))
            self.hooks.append((module, _watchers(module)))

    def broken(self) -> str:
        """What has changed since, or nothing."""
        for held, name, weight, version, place in self.weights:
            if held.get(name) is not weight or weight._version != version or weight.data_ptr() != place:
                return f"{name} changed"
        for held, name, child in self.children:
            if held.get(name) is not child:
                return f"{name} was replaced"
        for module, count in self.hooks:
            if _watchers(module) != count:
                return f"hooks of {type(module).__name__} changed"
        return ""


def _watchers(module: nn.Module) -> int:
    return len(module._forward_hooks) + len(module._forward_pre_hooks) + ("forward" in module.__dict__)
