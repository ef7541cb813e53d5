"""Fused: a Mamba2 mixer beside a narrow attention, both normed, scaled per channel and averaged."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from amor.checks import Expand, Groups, HeadSize, StateSize, Taps, Theta, Width, divides
from amor.form import Part
from amor.layout import Layout
from amor.mixers import attention, mamba2
from amor.mixers.base import Mixer
from amor.parts import Cost, RMSNorm
from amor.program import Program, Vector


@dataclass(frozen=True)
class FusedOptions:
    """Shape of both halves; the defaults are those of Mamba2 and of attention."""

    expand: Expand = 2  # Mamba2's inner width over the model's width
    head_size: HeadSize = 64  # channels per head, of both
    state_size: StateSize = 128  # state numbers per channel
    groups: Groups = 1  # heads of a group share B and C
    conv: Taps = 4  # tokens that the short convolution reads
    rope_theta: Theta = 10_000.0  # base of the rotary frequencies
    # attention is 1 / share as wide as the model; 4 gives the paper's parameter counts
    share: Width = 4

    def check(self, width: int) -> None:
        """Refuse a width at which either half cannot be built."""
        self.mamba2.check(width)
        divides("fused.share", width, self.share, "share")
        self.attention(width).check(width)

    def parameters(self, width: int) -> int:
        """Exactly those of the mixer at a model width."""
        halves = self.mamba2.parameters(width) + self.attention(width).parameters(width)
        return halves + 4 * width  # a norm and a scale per half

    @property
    def mamba2(self) -> mamba2.Mamba2Options:
        """The options of the Mamba2 half."""
        return mamba2.Mamba2Options(
            self.expand, self.head_size, self.state_size, self.groups, self.conv
        )

    def attention(self, width: int) -> attention.AttentionOptions:
        """The options of the attention half at a model width."""
        return attention.AttentionOptions(self.head_size, self.rope_theta, width // self.share)


class Fused(Mixer):
    """(norm(mamba2(x)) * s_m + norm(attention(x)) * s_a) / 2, with a scale s per channel."""

    kind = "fused"
    Options = FusedOptions

    def __init__(self, width: int, options: FusedOptions, eps: float):
        super().__init__()
        self.mamba2 = mamba2.Mamba2(width, options.mamba2, eps)
        self.attention = attention.Attention(width, options.attention(width), eps)
        self.mamba2_norm, self.attention_norm = RMSNorm(width, eps), RMSNorm(width, eps)
        self.mamba2_scale = nn.Parameter(torch.ones(width))
        self.attention_scale = nn.Parameter(torch.ones(width))

    def reset_parameters(self, generator: torch.Generator | None) -> None:
        self.mamba2_scale.data.fill_(1.0)
        self.attention_scale.data.fill_(1.0)

    def start(self, batch: int, device: torch.device, dtype: torch.dtype) -> Part:
        return self.mamba2.start(batch, device, dtype) | self.attention.start(batch, device, dtype)

    def forward(self, x: Tensor, state: Part, layout: Layout) -> tuple[Tensor, Part]:
        m, after_m = self.mamba2(x, {"conv": state["conv"], "scan": state["scan"]}, layout)
        a, after_a = self.attention(x, {"kv": state["kv"]}, layout)
        m = self.mamba2_norm(m) * self.mamba2_scale.to(m.dtype)
        a = self.attention_norm(a) * self.attention_scale.to(a.dtype)
        return (m + a) / 2, after_m | after_a

    def program(self, p: Program, x: Vector) -> Vector:
        m, a = self.mamba2.program(p, x), self.attention.program(p, x)
        m = p.norm(m, self.mamba2_norm, self.mamba2_scale.detach().float() / 2)
        return p.add(m, p.norm(a, self.attention_norm, self.attention_scale.detach().float() / 2))

    def cost(self, context: int) -> Cost:
        width = self.mamba2_scale.numel()
        return self.mamba2.cost(context) + self.attention.cost(context) + Cost(weights=4 * width)
