"""Mamba2 (arXiv 2405.21060): a state-space mixer with one scalar decay per head.

Parameters are named as in transformers' Mamba2Mixer.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from amor.checks import Expand, Groups, HeadSize, StateSize, Taps, divides
from amor.form import Part
from amor.layout import Layout
from amor.mixers.base import Mixer
from amor.ops.gated_norm import gate_norm
from amor.ops.scan import scan
from amor.parts import Cost, Linear, RMSNorm, ShortConv, linear_cost, same_anywhere, split_linear
from amor.program import Program, Vector

DT_MIN, DT_MAX, DT_FLOOR = 1e-3, 1e-1, 1e-4  # of initial step sizes, as mamba-ssm has them


@dataclass(frozen=True)
class Mamba2Options:
    """Shape of a Mamba2 mixer; the defaults are those of the Mamba2 paper."""

    expand: Expand = 2  # inner width over the model's width
    head_size: HeadSize = 64  # channels per head
    state_size: StateSize = 128  # state numbers per channel
    groups: Groups = 1  # heads of a group share B and C
    conv: Taps = 4  # tokens that the short convolution reads

    def check(self, width: int) -> None:
        """Refuse heads that do not divide the inner width, or groups the heads."""
        divides("mamba2.head_size", self.expand * width, self.head_size, "head size")
        divides("mamba2.groups", self.expand * width // self.head_size, self.groups, "groups")

    def parameters(self, width: int) -> int:
        """Exactly those of the mixer at a model width."""
        inner = self.expand * width
        heads, mixed = inner // self.head_size, inner + 2 * self.groups * self.state_size
        projections = width * (inner + mixed + heads) + inner * width
        vectors = 3 * heads + inner  # dt_bias, A_log, D; norm
        return projections + mixed * (self.conv + 1) + vectors  # the convolution has a bias


class Mamba2(Mixer):
    """The Mamba2 recurrence (amor/ops/scan) with a short convolution and a gated norm around it."""

    kind = "mamba2"
    Options = Mamba2Options

    def __init__(self, width: int, options: Mamba2Options, eps: float):
        super().__init__()
        self.options = options
        self.inner = options.expand * width
        self.heads = self.inner // options.head_size
        self.mixed = self.inner + 2 * options.groups * options.state_size  # channels of x, B, C
        self.in_proj = Linear(width, self.inner + self.mixed + self.heads)
        self.conv1d = ShortConv(self.mixed, options.conv, bias=True)
        self.dt_bias = nn.Parameter(torch.empty(self.heads))
        self.A_log = nn.Parameter(torch.empty(self.heads))
        self.D = nn.Parameter(torch.empty(self.heads))
        self.norm = RMSNorm(self.inner, eps)
        self.out_proj = Linear(self.inner, width)

    def reset_parameters(self, generator: torch.Generator | None) -> None:
        self.A_log.data = torch.arange(1, self.heads + 1, dtype=torch.float32).log()
        self.D.data.fill_(1.0)
        self.dt_bias.data = inverse_softplus(random_dt(self.heads, generator))

    def start(self, batch: int, device: torch.device, dtype: torch.dtype) -> Part:
        s = torch.zeros(
            batch, self.heads, self.options.head_size, self.options.state_size, device=device
        )
        return {"conv": self.conv1d.start(batch, device, dtype), "scan": s}

    def forward(self, x: Tensor, state: Part, layout: Layout) -> tuple[Tensor, Part]:
        z, xBC, dt = split_linear(x, self.in_proj, [self.inner, self.mixed, self.heads])
        xBC, window = self.conv1d(xBC, state["conv"], layout)
        states = self.options.groups * self.options.state_size
        u, B, C = xBC.split([self.inner, states, states], dim=-1)
        u = u.unflatten(-1, (self.heads, -1))
        B, C = (t.unflatten(-1, (self.options.groups, -1)) for t in (B, C))
        dt = same_anywhere(F.softplus, dt.float() + self.dt_bias.float())
        if layout.valid is not None:
            dt = dt * layout.valid[..., None]
        s = state["scan"]
        assert isinstance(s, Tensor)
        y, s = scan(u, dt, -self.A_log.float().exp(), B, C, s, layout.reset, self.D)
        y = gate_norm(y.flatten(2), z, self.norm.weight, self.norm.eps)
        return self.out_proj(y), {"conv": window, "scan": s}

    def program(self, p: Program, x: Vector) -> Vector:
        z, xBC, dt = p.linear(x, self.in_proj).split(self.inner, self.mixed, self.heads)
        states = self.options.groups * self.options.state_size
        u, B, C = p.conv(xBC, self.conv1d, "conv").split(self.inner, states, states)
        A = -self.A_log.detach().float().exp()
        y = p.scan(u, dt, B, C, A, self.D, self.dt_bias, self.options.groups, "scan")
        return p.linear(p.gated_norm(y, z, self.norm, gate_first=True), self.out_proj)

    def cost(self, context: int) -> Cost:
        numbers = self.inner * self.options.state_size
        state = 4 * (numbers + self.mixed * (self.options.conv - 1))
        small = self.conv1d.weight.numel() + self.mixed + 3 * self.heads + self.inner
        return linear_cost(self.in_proj, self.out_proj) + Cost(
            flops=4 * numbers, weights=small, state_read=state, state_held=state
        )


def random_dt(count: int, generator: torch.Generator | None) -> Tensor:
    """[count] step sizes, uniform on a logarithmic scale, as Mamba draws them."""
    ratio = math.log(DT_MAX) - math.log(DT_MIN)
    logs = torch.rand(count, generator=generator) * ratio + math.log(DT_MIN)
    return logs.exp().clamp(min=DT_FLOOR)


def inverse_softplus(x: Tensor) -> Tensor:
    """The x whose softplus is the given one; for positive numbers."""
    return x + torch.log(-torch.expm1(-x))
