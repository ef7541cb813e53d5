"""Published recurrences written out in float64, token by token, for sources whose library cannot
run on a CPU.

Nothing here is taken from our operators or from a conversion: a source's own tensors are read by
the source's own names, and every sum is in the open, so that a mistake in either shows. Letters:
H heads of size P, N states, T tokens.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

Weights = dict[str, Tensor]
WRITTEN = "the published recurrence written out in float64"


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of the last dimension."""
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def convolved(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Causal convolution of each channel by itself, then SiLU; x [B, T, C], weight [C, 1, taps]."""
    taps = weight.shape[-1]
    back = F.pad(x, (0, 0, taps - 1, 0))
    y = torch.zeros_like(x) if bias is None else bias.expand_as(x).clone()
    for tap in range(taps):
        y += back[:, tap : tap + x.shape[1]] * weight[:, 0, tap]
    return F.silu(y)


def mamba2(
    x: Tensor, w: Weights, head_size: int, states: int, eps: float, groups: int = 1
) -> Tensor:
    """s <- exp(-exp(A_log) dt) s + dt u B^T,  y = s C + D u per head;
    then y silu(z) is normed and projected.

    groups: of B and C; heads of a group share them, the norm is over all channels.
    """
    heads, inner = len(w["A_log"]), w["out_proj.weight"].shape[1]
    bc = groups * states
    z, ubc, dt = (x @ w["in_proj.weight"].T).split([inner, inner + 2 * bc, heads], dim=-1)
    ubc = convolved(ubc, w["conv1d.weight"], w.get("conv1d.bias"))
    u, b, c = ubc.split([inner, bc, bc], dim=-1)
    b, c = (
        t.unflatten(-1, (groups, -1)).repeat_interleave(heads // groups, dim=-2) for t in (b, c)
    )
    u, dt = u.unflatten(-1, (heads, head_size)), F.softplus(dt + w["dt_bias"])
    keeps = (-w["A_log"].exp() * dt).exp()
    s, y = x.new_zeros(len(x), heads, head_size, states), torch.empty_like(u)
    for t in range(x.shape[1]):
        s = (
            keeps[:, t, :, None, None] * s
            + (dt[:, t, :, None] * u[:, t])[..., None] * b[:, t, :, None, :]
        )
        y[:, t] = (s * c[:, t, :, None, :]).sum(-1)
    y = (y + w["D"][:, None] * u).flatten(2)
    return norm(y * F.silu(z), w["norm.weight"], eps) @ w["out_proj.weight"].T


def gated_deltanet(x: Tensor, w: Weights, head_size: int, eps: float) -> Tensor:
    """s <- decay s;  s <- s + k (beta (v - s^T k))^T;  o = s^T q / sqrt d per head;
    then norm(o) silu(g) is projected."""
    q, k, v = (convolved(x @ w[f"{n}_proj.weight"].T, w[f"{n}_conv1d.weight"]) for n in "qkv")
    heads, value = len(w["A_log"]), len(w["o_norm.weight"])
    q, k = (_unit(t.unflatten(-1, (heads, head_size))) for t in (q, k))
    v = v.unflatten(-1, (heads, value))
    decay = (-w["A_log"].exp() * F.softplus(x @ w["a_proj.weight"].T + w["dt_bias"])).exp()
    beta = (x @ w["b_proj.weight"].T).sigmoid()
    s, o = x.new_zeros(len(x), heads, head_size, value), torch.empty_like(v)
    for t in range(x.shape[1]):
        s = decay[:, t, :, None, None] * s
        recalled = (k[:, t, :, :, None] * s).sum(-2)
        s = s + k[:, t, :, :, None] * (beta[:, t, :, None] * (v[:, t] - recalled))[:, :, None, :]
        o[:, t] = (q[:, t, :, :, None] * s).sum(-2) / head_size**0.5
    gate = (x @ w["g_proj.weight"].T).unflatten(-1, (heads, value))
    return (norm(o, w["o_norm.weight"], eps) * F.silu(gate)).flatten(2) @ w["o_proj.weight"].T


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Softmax attention [B, H, T, d] of every token to itself and those before; -> [B, T, H d]."""
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    out = scores.masked_fill(later, -math.inf).softmax(-1) @ v
    return out.transpose(1, 2).flatten(2)


def swiglu(x: Tensor, w: Weights) -> Tensor:
    """down(silu(gate x) * up x)."""
    gate, up = x @ w["gate_proj.weight"].T, x @ w["up_proj.weight"].T
    return (F.silu(gate) * up) @ w["down_proj.weight"].T


def _unit(x: Tensor) -> Tensor:
    """Normalised to length 1, with fla's 1e-6 under the root."""
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def double(w: Weights) -> Weights:
    """The weights in float64."""
    return {name: t.double() for name, t in w.items()}


def below(w: Weights, name: str) -> Weights:
    """The weights of one part, by their names inside it."""
    return {key.removeprefix(f"{name}."): t for key, t in w.items() if key.startswith(f"{name}.")}
