"""The backbone: a pattern of layers, each a mixer and an MLP with a norm before either; d_ff = 0
leaves the MLP out.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from amor.config import Config
from amor.form import Part
from amor.layout import Layout, last_real
from amor.mixers.base import Mixer, find_mixer
from amor.parts import Cost, RMSNorm, SwiGLU
from amor.program import Program, Vector, require_program


class Layer(nn.Module):
    """h + mixer(norm h), then h + mlp(norm h)."""

    def __init__(self, config: Config, kind: str):
        super().__init__()
        self.mixer_norm = RMSNorm(config.width, config.eps("mixer_norm"))
        self.mixer: Mixer = find_mixer(kind)(
            config.width, config.mixer_options(kind), config.eps("mixer")
        )
        self.mlp_norm = RMSNorm(config.width, config.eps("mlp_norm")) if config.d_ff else None
        self.mlp = SwiGLU(config.width, config.d_ff) if config.d_ff else None

    def forward(
        self, h: Tensor, state: Part, layout: Layout, last: bool = False
    ) -> tuple[Tensor, Part]:
        """The residual h [B, T, D] after the layer; last: of each row's last token only."""
        mix = self.mixer.last if last else self.mixer
        mixed, after = mix(self.mixer_norm(h), state, layout)
        h = (last_real(h, layout) if last else h) + mixed
        if self.mlp is None or self.mlp_norm is None:
            return h, after
        return h + self.mlp(self.mlp_norm(h)), after

    def program(self, p: Program, h: Vector) -> None:
        """Updates h, the residual of one token per row, in place."""
        require_program(self.mixer)
        p.accumulate(h, self.mixer.program(p, p.norm(h, self.mixer_norm)))  # type: ignore[operator]
        if self.mlp is not None and self.mlp_norm is not None:
            p.accumulate(h, p.swiglu(p.norm(h, self.mlp_norm), self.mlp))

    def cost(self, context: int) -> Cost:
        """One more token behind `context` others."""
        norm = Cost(weights=self.mixer_norm.weight.numel())
        return (
            self.mixer.cost(context)
            + norm
            + (Cost() if self.mlp is None else norm + self.mlp.cost())
        )


class Backbone(nn.Module):
    """The layers in sequence."""

    def __init__(self, config: Config):
        super().__init__()
        self.layers = nn.ModuleList(Layer(config, kind) for kind in config.pattern)
        self.recompute = False  # activations are computed again in the backward pass

    def start(self, batch: int, device: torch.device, dtype: torch.dtype) -> list[Part]:
        """The layers' parts of a fresh State."""
        mixers = (layer.mixer for layer in self.layers)
        return [mixer.start(batch, device, dtype) for mixer in mixers]  # type: ignore[union-attr, operator]

    def forward(
        self, h: Tensor, parts: Sequence[Part], layout: Layout, last: bool = False
    ) -> tuple[Tensor, list[Part]]:
        """The residual after all layers; last: of each row's last token only."""
        after = []
        for index, (layer, part) in enumerate(zip(self.layers, parts, strict=True), 1):
            ends = last and index == len(self.layers)
            if self.recompute and torch.is_grad_enabled():
                h, part = checkpoint(layer, h, part, layout, ends, use_reentrant=False)
            else:
                h, part = layer(h, part, layout, ends)
            after.append(part)
        return h, after

    def cost(self, context: int) -> Cost:
        """One more token behind `context` others, over all layers."""
        return sum((layer.cost(context) for layer in self.layers), Cost())  # type: ignore[operator]
