"""The contract of a mixer.

A mixer reads T >= 1 tokens from a part of the State and returns the part after them; T = 1 is not
special. It holds parameters only: what it remembers is handed in and out. Rows come aligned (real
tokens first); pads must leave no trace in the state. Options describe its shape
(`checks.MixerOptions`): they refuse a width that cannot be built, and count the parameters, both
without building anything.

A mixer may also state its one-token program, `program(self, p: Program, x: Vector) -> Vector`
(amor/program.py), the same numbers in the same order as its forward with T = 1: decode then runs it
in native code. Without one, decode runs its forward.
"""

from typing import ClassVar

import torch
from torch import Tensor, nn

from amor import registry
from amor.checks import MixerOptions
from amor.form import Part
from amor.layout import Layout, last_real
from amor.parts import Cost


class Mixer(nn.Module):
    """Base of mixers; a subclass is built as `cls(width, options, eps)`, eps that of its norms."""

    kind: str  # the name of its module, and in a pattern
    Options: ClassVar[type[MixerOptions]]  # a frozen dataclass

    def start(self, batch: int, device: torch.device, dtype: torch.dtype) -> Part:
        """The state of `batch` rows that have read nothing."""
        raise NotImplementedError

    def forward(self, x: Tensor, state: Part, layout: Layout) -> tuple[Tensor, Part]:
        """x [B, T, D] -> [B, T, D], to be added to the residual, and the state after the tokens."""
        raise NotImplementedError

    def last(self, x: Tensor, state: Part, layout: Layout) -> tuple[Tensor, Part]:
        """As forward, but returns each row's last real token only, [B, 1, D].

        Override it where the work for the other tokens can be left out.
        """
        out, after = self(x, state, layout)
        return last_real(out, layout), after

    def cost(self, context: int) -> Cost:
        """Cost of one more token after `context` tokens; the state in float32."""
        raise NotImplementedError

    def reset_parameters(self, generator: torch.Generator | None) -> None:
        """Initialise the parameters that are not drawn from N(0, config.init_std)."""


def find_mixer(kind: str) -> type[Mixer]:
    """The class of a mixer kind, or of `package.module.Class`."""
    return registry.find("mixers", kind)
