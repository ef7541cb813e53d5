"""Small modules that mixers and models share: norm, linear, SwiGLU, short convolution, and Cost."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass

import torch
from torch import Tensor, nn

from amor.layout import Layout
from amor.ops import rowwise
from amor.ops.conv import conv
from amor.ops.linear import linear, linears
from amor.ops.linear.reference import joined


@dataclass(frozen=True)
class Cost:
    """Cost of one more token of one row at a context length."""

    flops: float = 0.0  # of matrix products and recurrences
    weights: float = 0.0  # parameters read, in numbers, not bytes
    state_read: float = 0.0  # bytes of recurrent state, keys and values that it reads
    state_held: float = 0.0  # bytes of memory that a row occupies

    def __add__(self, other: Cost) -> Cost:
        return Cost(*map(operator.add, astuple(self), astuple(other)))

    def __mul__(self, times: float) -> Cost:
        return Cost(*(number * times for number in astuple(self)))


def same_anywhere(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """An elementwise function in float32 whose bits do not depend on a number's place in x.

    torch computes the ends of a tensor by another exponential than the middle, so a token's last
    bit would depend on its neighbours in the batch. In float64 they differ too, far behind the
    digits that float32 keeps; Metal has no float64.
    """
    return function(x.to(torch.float32 if x.device.type == "mps" else torch.float64)).float()


def linear_cost(*layers: nn.Linear) -> Cost:
    """Cost of one token through linear layers."""
    count = sum(layer.weight.numel() for layer in layers)
    return Cost(flops=2 * count, weights=count)


class RMSNorm(nn.Module):
    """x / rms(x) * weight, in float32 inside."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """x [..., width] -> the same shape and dtype."""
        return rowwise.norm(x, self.weight, self.eps)


class Linear(nn.Linear):
    """A linear layer without bias."""

    def __init__(self, width: int, out: int):
        super().__init__(width, out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., width] -> [..., out]."""
        return linear(x, self.weight)


def touched(module: nn.Module) -> str:
    """Why a module does more than its class: a hook, or another forward set on it; else ""."""
    if (
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    ):
        return f"a hook watches {type(module).__name__}"
    return f"{type(module).__name__} was given another forward" if "forward" in vars(module) else ""


def plain(layer: nn.Module) -> bool:
    """Whether a layer is its weight alone: not replaced or wrapped (as adapters do), no hook."""
    return type(layer) is Linear and not touched(layer)


def linears_sharing_input(x: Tensor, *groups: Sequence[nn.Linear]) -> tuple[Tensor, ...]:
    """Layers that read the same x [..., D]; one result per group, its layers' side by side."""
    if all(plain(layer) for group in groups for layer in group):
        return linears(x, [[layer.weight for layer in group] for group in groups])
    return tuple(joined([layer(x) for layer in group]) for group in groups)


def split_linear(x: Tensor, layer: nn.Linear, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    """The result of one layer split into `sizes`, each part dense in memory if it is plain."""
    if plain(layer):
        return linears(x, [[part] for part in layer.weight.split(sizes)])
    return layer(x).split(sizes, dim=-1)


class SwiGLU(nn.Module):
    """down(silu(gate x) * up x)."""

    def __init__(self, width: int, d_ff: int):
        super().__init__()
        self.gate_proj = Linear(width, d_ff)
        self.up_proj = Linear(width, d_ff)
        self.down_proj = Linear(d_ff, width)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., width] -> [..., width]."""
        return self.down_proj(
            rowwise.swiglu(*linears_sharing_input(x, [self.gate_proj], [self.up_proj]))
        )

    def cost(self) -> Cost:
        """Cost of one token."""
        return linear_cost(self.gate_proj, self.up_proj, self.down_proj)


class ShortConv(nn.Module):
    """Causal depthwise convolution over a few tokens, then SiLU.

    Weights as in nn.Conv1d: [channels, 1, taps].
    """

    def __init__(self, channels: int, taps: int, bias: bool):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, taps))
        self.bias = nn.Parameter(torch.empty(channels)) if bias else None

    def start(self, batch: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        """The window of rows that have read nothing: zeros [B, taps - 1, channels]."""
        channels, _, taps = self.weight.shape
        return torch.zeros(batch, taps - 1, channels, device=device, dtype=dtype)

    def forward(self, x: Tensor, window: Tensor | None, layout: Layout) -> tuple[Tensor, Tensor]:
        """x [B, T, channels] after the window -> the same shape, and the window after it."""
        return conv(
            x, self.weight[:, 0].to(x.dtype), self.bias, window, layout.lengths, layout.reset
        )


def fan_heads(x: Tensor, head_size: int) -> Tensor:
    """[..., H d] -> [..., H, d]."""
    return x.unflatten(-1, (-1, head_size))
