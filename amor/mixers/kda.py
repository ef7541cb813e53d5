"""Kimi Delta Attention (KDA, arXiv 2510.26692): Gated DeltaNet with a decay per channel of the key.

Parameters are named as in transformers' KimiLinearDeltaAttention, those of its forget gate beside
the others. Decay and output gate (a sigmoid) pass through as few channels as a key has.

By default the heads fill the model's width and a value is as large as a key: 4 width^2 parameters
and a little, as attention has, and a state of 64 numbers per channel of the width. `expand_v = 2`
makes it the 6 width^2 of Mamba2 and Gated DeltaNet.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from amor.checks import Expand, Heads, HeadSize, Taps
from amor.errors import AmorError
from amor.form import Part
from amor.layout import Layout
from amor.mixers.base import Mixer
from amor.mixers.gated_deltanet import UNIT_EPS, unit
from amor.mixers.mamba2 import inverse_softplus, random_dt
from amor.ops.delta import delta
from amor.parts import (
    Cost,
    Linear,
    RMSNorm,
    ShortConv,
    fan_heads,
    linear_cost,
    linears_sharing_input,
    same_anywhere,
)
from amor.program import Program, Vector


@dataclass(frozen=True)
class KDAOptions:
    """Shape of a KDA mixer; by default about 4 width^2 parameters, as attention has."""

    head_size: HeadSize = 64  # channels of a key per head
    heads: Heads = 0  # 0: as many as fill the model's width
    expand_v: Expand = 1  # channels of a value over those of a key
    conv: Taps = 4  # tokens that the short convolution reads

    def check(self, width: int) -> None:
        """Refuse a width that the heads do not fill."""
        if not self.heads and width % self.head_size:
            fill = width / self.head_size
            near = max(1, round(fill))
            raise AmorError(
                f"kda: heads of {self.head_size} do not fill width {width} ({fill:.2f} heads); "
                f"give heads={near}"
            )

    def count(self, width: int) -> int:
        """Number of heads at a model width."""
        return self.heads or width // self.head_size

    def parameters(self, width: int) -> int:
        """Exactly those of the mixer at a model width."""
        size, heads = self.head_size, self.count(width)
        value_size = size * self.expand_v
        keys, values = heads * size, heads * value_size
        projections = width * (2 * keys + 2 * values + heads)  # q, k; v, output; b
        gates = 2 * width * size + size * (keys + values)  # f and g, each through `size` channels
        vectors = heads + keys + value_size  # A_log, dt_bias, norm
        return projections + gates + (2 * keys + values) * self.conv + vectors


class KDA(Mixer):
    """Gated delta rule with a decay per channel of the key, a norm and a sigmoid at the output."""

    kind = "kda"
    Options = KDAOptions

    def __init__(self, width: int, options: KDAOptions, eps: float):
        super().__init__()
        self.options = options
        self.heads = options.count(width)
        size = options.head_size
        self.value_size = size * options.expand_v
        self.keys, self.values = self.heads * size, self.heads * self.value_size
        self.q_proj = Linear(width, self.keys)
        self.k_proj = Linear(width, self.keys)
        self.v_proj = Linear(width, self.values)
        self.f_a_proj, self.f_b_proj = Linear(width, size), Linear(size, self.keys)
        self.g_a_proj, self.g_b_proj = Linear(width, size), Linear(size, self.values)
        self.b_proj = Linear(width, self.heads)
        self.conv1d = ShortConv(2 * self.keys + self.values, options.conv, bias=False)
        self.A_log = nn.Parameter(torch.empty(self.heads))
        self.dt_bias = nn.Parameter(torch.empty(self.keys))
        self.o_norm = RMSNorm(self.value_size, eps)
        self.o_proj = Linear(self.values, width)

    def reset_parameters(self, generator: torch.Generator | None) -> None:
        self.A_log.data = (1 + 15 * torch.rand(self.heads, generator=generator)).log()
        self.dt_bias.data = inverse_softplus(random_dt(self.keys, generator))

    def start(self, batch: int, device: torch.device, dtype: torch.dtype) -> Part:
        s = torch.zeros(batch, self.heads, self.options.head_size, self.value_size, device=device)
        return {"conv": self.conv1d.start(batch, device, dtype), "delta": s}

    def forward(self, x: Tensor, state: Part, layout: Layout) -> tuple[Tensor, Part]:
        joined = self.q_proj, self.k_proj, self.v_proj
        qkv, f, gate, b = linears_sharing_input(
            x, joined, [self.f_a_proj], [self.g_a_proj], [self.b_proj]
        )
        qkv, window = self.conv1d(qkv, state["conv"], layout)
        q, k, v = qkv.split([self.keys, self.keys, self.values], dim=-1)
        size = self.options.head_size
        q, k = unit(fan_heads(q, size).float(), size**-0.5), unit(fan_heads(k, size).float())
        beta = same_anywhere(torch.sigmoid, b)
        steps = same_anywhere(F.softplus, self.f_b_proj(f).float() + self.dt_bias.float())
        g = -self.A_log.float().exp()[:, None] * fan_heads(steps, size)
        if layout.valid is not None:
            g, beta = g * layout.valid[..., None, None], beta * layout.valid[..., None]
        s = state["delta"]
        assert isinstance(s, Tensor)
        o, s = delta(q, k, fan_heads(v, self.value_size), g, beta, s, layout.reset)
        gate = fan_heads(self.g_b_proj(gate), self.value_size)
        o = (self.o_norm(o) * same_anywhere(torch.sigmoid, gate)).to(gate.dtype)
        return self.o_proj(o.flatten(2)), {"conv": window, "delta": s}

    def program(self, p: Program, x: Vector) -> Vector:
        size, sizes = self.options.head_size, (self.keys, self.keys, self.values)
        projected = p.linear(
            x, self.q_proj, self.k_proj, self.v_proj, self.f_a_proj, self.g_a_proj, self.b_proj
        )
        qkv, f, gate, b = projected.split(sum(sizes), size, size, self.heads)
        q, k, v = p.conv(qkv, self.conv1d, "conv").split(*sizes)
        q = p.unit_norm(q, size, size**-0.5, UNIT_EPS / size)
        k = p.unit_norm(k, size, 1.0, UNIT_EPS / size)
        steps = p.linear(f, self.f_b_proj)
        o = p.delta(q, k, v, steps, b, -self.A_log.detach().float().exp(), self.dt_bias, "delta")
        return p.linear(
            p.gate(p.norm(o, self.o_norm), p.linear(gate, self.g_b_proj), "sigmoid"), self.o_proj
        )

    def cost(self, context: int) -> Cost:
        numbers = self.keys * self.value_size
        state = 4 * (numbers + (2 * self.keys + self.values) * (self.options.conv - 1))
        small = self.conv1d.weight.numel() + self.heads + self.keys + self.value_size
        into = self.q_proj, self.k_proj, self.v_proj, self.f_a_proj, self.g_a_proj, self.b_proj
        products = linear_cost(*into, self.f_b_proj, self.g_b_proj, self.o_proj)
        return products + Cost(flops=6 * numbers, weights=small, state_read=state, state_held=state)
