"""Gated DeltaNet (arXiv 2412.06464): a linear memory that corrects what it holds.

Parameters are named as in fla's layer, with one convolution over q, k and v together.
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
from amor.mixers.mamba2 import inverse_softplus, random_dt
from amor.ops.delta import delta
from amor.ops.gated_norm import norm_gate
from amor.ops.rowwise import norm
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

UNIT_EPS = 1e-6  # added to the sum of squares of q and k, as in fla and transformers


@dataclass(frozen=True)
class GatedDeltaNetOptions:
    """Shape of a Gated DeltaNet mixer; by default about 6 width^2 parameters, as Mamba2 has."""

    head_size: HeadSize = 64  # channels of a key per head
    heads: Heads = 0  # 0: as many as fill three quarters of the model's width
    expand_v: Expand = 2  # channels of a value over those of a key
    conv: Taps = 4  # tokens that the short convolution reads

    def check(self, width: int) -> None:
        """Refuse a width that the heads do not fill."""
        if not self.heads and (3 * width) % (4 * self.head_size):
            near = max(1, round(3 * width / (4 * self.head_size)))
            raise AmorError(
                f"gated_deltanet: heads of {self.head_size} do not fill three quarters of width "
                f"{width} ({0.75 * width / self.head_size:.2f} heads); give heads={near}"
            )

    def count(self, width: int) -> int:
        """Number of heads at a model width."""
        return self.heads or 3 * width // (4 * self.head_size)

    def parameters(self, width: int) -> int:
        """Exactly those of the mixer at a model width."""
        heads, value_size = self.count(width), self.head_size * self.expand_v
        keys, values = heads * self.head_size, heads * value_size
        projections = width * (2 * keys + 3 * values + 2 * heads)  # q, k; v, g, output; a, b
        vectors = 2 * heads + value_size  # A_log, dt_bias; norm
        return projections + (2 * keys + values) * self.conv + vectors


class GatedDeltaNet(Mixer):
    """Gated delta rule (amor/ops/delta) with one decay per head and a gated norm at the output."""

    kind = "gated_deltanet"
    Options = GatedDeltaNetOptions

    def __init__(self, width: int, options: GatedDeltaNetOptions, eps: float):
        super().__init__()
        self.options = options
        self.heads = options.count(width)
        self.value_size = options.head_size * options.expand_v
        self.keys, self.values = self.heads * options.head_size, self.heads * self.value_size
        self.q_proj = Linear(width, self.keys)
        self.k_proj = Linear(width, self.keys)
        self.v_proj = Linear(width, self.values)
        self.g_proj = Linear(width, self.values)
        self.a_proj = Linear(width, self.heads)
        self.b_proj = Linear(width, self.heads)
        self.conv1d = ShortConv(2 * self.keys + self.values, options.conv, bias=False)
        self.A_log = nn.Parameter(torch.empty(self.heads))
        self.dt_bias = nn.Parameter(torch.empty(self.heads))
        self.o_norm = RMSNorm(self.value_size, eps)
        self.o_proj = Linear(self.values, width)

    def reset_parameters(self, generator: torch.Generator | None) -> None:
        # A ~ U(0, 16); kept off 0, whose logarithm is -inf
        self.A_log.data = (torch.rand(self.heads, generator=generator) * 16).clamp(min=1e-2).log()
        self.dt_bias.data = inverse_softplus(random_dt(self.heads, generator))

    def start(self, batch: int, device: torch.device, dtype: torch.dtype) -> Part:
        s = torch.zeros(batch, self.heads, self.options.head_size, self.value_size, device=device)
        return {"conv": self.conv1d.start(batch, device, dtype), "delta": s}

    def forward(self, x: Tensor, state: Part, layout: Layout) -> tuple[Tensor, Part]:
        joined = self.q_proj, self.k_proj, self.v_proj
        qkv, gate, a, b = linears_sharing_input(
            x, joined, [self.g_proj], [self.a_proj], [self.b_proj]
        )
        qkv, window = self.conv1d(qkv, state["conv"], layout)
        q, k, v = qkv.split([self.keys, self.keys, self.values], dim=-1)
        size = self.options.head_size
        q, k = unit(fan_heads(q, size).float(), size**-0.5), unit(fan_heads(k, size).float())
        beta = same_anywhere(torch.sigmoid, b)
        g = -self.A_log.float().exp() * same_anywhere(F.softplus, a.float() + self.dt_bias.float())
        if layout.valid is not None:
            g, beta = g * layout.valid[..., None], beta * layout.valid[..., None]
        s = state["delta"]
        assert isinstance(s, Tensor)
        o, s = delta(q, k, fan_heads(v, self.value_size), g, beta, s, layout.reset)
        o = norm_gate(o, fan_heads(gate, self.value_size), self.o_norm.weight, self.o_norm.eps)
        return self.o_proj(o.flatten(2)), {"conv": window, "delta": s}

    def program(self, p: Program, x: Vector) -> Vector:
        size, sizes = self.options.head_size, (self.keys, self.keys, self.values)
        projected = p.linear(
            x, self.q_proj, self.k_proj, self.v_proj, self.g_proj, self.a_proj, self.b_proj
        )
        qkv, gate, a, b = projected.split(sum(sizes), self.values, self.heads, self.heads)
        q, k, v = p.conv(qkv, self.conv1d, "conv").split(*sizes)
        q = p.unit_norm(q, size, size**-0.5, UNIT_EPS / size)
        k = p.unit_norm(k, size, 1.0, UNIT_EPS / size)
        o = p.delta(q, k, v, a, b, -self.A_log.detach().float().exp(), self.dt_bias, "delta")
        return p.linear(p.gated_norm(o, gate, self.o_norm, gate_first=False), self.o_proj)

    def cost(self, context: int) -> Cost:
        numbers = self.keys * self.value_size
        state = 4 * (numbers + (2 * self.keys + self.values) * (self.options.conv - 1))
        small = self.conv1d.weight.numel() + 2 * self.heads + self.value_size
        into = self.q_proj, self.k_proj, self.v_proj, self.g_proj, self.a_proj, self.b_proj
        products = linear_cost(*into, self.o_proj)
        return products + Cost(flops=6 * numbers, weights=small, state_read=state, state_held=state)


def unit(x: Tensor, length: float = 1.0) -> Tensor:
    """x [..., size] scaled to a length, with UNIT_EPS inside the root of the sum of squares."""
    size = x.shape[-1]
    return norm(x, x.new_full((size,), length * size**-0.5), UNIT_EPS / size)
