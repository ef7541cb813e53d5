"""The contract of a mixer.

A mixer reads T >= 1 tokens from a part of the state and gives the part after them; T = 1 is not special. It holds
parameters only: what it remembers is handed in and out. Rows come aligned (real tokens first); pads must leave no trace
in the state. Options describe its shape (`checks.MixerOptions`): they refuse a width that cannot be built, and count the
parameters, both without building anything.

A mixer may also state its one-token program, `program(self, p: Program, x: Vector) -> Vector` (amor/program.py), the same
numbers in the same order as its forward with T = 1: decode then runs it in native code. One that does not runs its forward.
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
    kind: str
    Options: ClassVar[type[MixerOptions]]

    def start(self, batch: int, device: torch.device, dtype: torch.dtype) -> Part:
        """The state of rows that have read nothing."""
        raise NotImplementedError

    def forward(self, x: Tensor, state: Part, layout: Layout) -> tuple[Tensor, Part]:
        """x [B, T, D] -> what the tokens say to each other [B, T, D], and the state after them."""
        raise NotImplementedError

    def last(self, x: Tensor, state: Part, layout: Layout) -> tuple[Tensor, Part]:
        """As forward, of each row's last token only, [B, 1, D]. One that can leave out work for the others says how."""
        out, after = self(x, state, layout)
        return last_real(out, layout), after

    def cost(self, context: int) -> Cost:
        """One more token when `context` tokens stand before it; the state in float32."""
        raise NotImplementedError

    def reset_parameters(self, generator: torch.Generator | None) -> None:
        """Initialise what does not follow the house rule N(0, config.init_std)."""


def find_mixer(kind: str) -> type[Mixer]:
    """The class of a mixer kind, or of `package.module.Class`."""
    return registry.find("mixers", kind)
