"""The authors' model written out in float64: logits, entropies and gate decisions of one forward.

    Embed -> [ h + mixer(norm h), h + mlp(norm h) ] x N -> norm_f -> [ gated attention ] x K
          -> final_norm -> head

It reads a released folder's own tensors by their own names and shares nothing with our model or
with the conversion, so that a mistake in either shows. Letters: B rows of T tokens, D width,
V vocabulary, K blocks, H heads of size d.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from amor.convert.base import Outputs
from amor.convert.written import (
    Weights,
    below,
    causal,
    double,
    gated_deltanet,
    mamba2,
    norm,
    swiglu,
)

# epsilon per norm: transformers' Mamba2 blocks (and norm_f behind them) 1e-5, their own norms 1e-6
MAMBA2_EPS = {"mixer_norm": 1e-5, "mixer": 1e-5, "norm_f": 1e-5, "other": 1e-6}
GDN_EPS = {"mixer_norm": 1e-6, "mixer": 1e-5, "norm_f": 1e-6, "other": 1e-6}
ALPHA_MIN = -1.0  # raw alpha is clamped here
LOG_EPS = 1e-10  # added to a probability inside the logarithm of the entropy
KAPPA, FIXED_OFFSET = 0.2, 0.03
ROPE_BASE = 10_000.0
CHUNK = 64  # tokens whose V probabilities are held at once

# An entropy this close to its threshold falls on either side in float32: ours in float32 and this
# float64 were measured up to 4.5e-6 apart (random 180M models, V = 128,256), and their own float32
# up to 9e-6 from the exact entropy.
TIE = 1e-5


BY = "their model written out in float64"


@torch.no_grad()
def authors_forward(
    kwargs: Mapping[str, Any],
    tensors: Weights,
    tokens: Tensor,
    decided: Tensor | None = None,
    router: Sequence[Weights] | None = None,
) -> Outputs:
    """Run the model of `model_kwargs` (defaults filled in) on tokens [B, T].

    router: of a fitted router, a network per block whose prediction is compared with the threshold
    in place of the entropy, and stands in the output in its place.

    decided [K, B, T]: decisions of the model this one is compared with, taken over where an entropy
    is within TIE of its threshold: else one rounding would change every later token. Those that
    differed there are counted as `ties`.
    """
    eps = GDN_EPS if kwargs["backbone"] == "gdn" else MAMBA2_EPS
    embed = tensors["embed.weight"].double()
    h = embed[tokens]
    for i in range(kwargs["n_layer"]):
        layer = gdn_layer if kwargs["backbone"] == "gdn" else mamba2_layer
        h = layer(h, tensors, i, kwargs)
    norm_f = tensors["norm_f.weight"].double()
    if kwargs["residual_mode"] == "classic":
        h = norm(h, norm_f, eps["norm_f"])
    entropies, fires, ties = [], [], 0
    for k in range(kwargs["n_amor_blocks"]):
        w = double(below(tensors, f"amor_blocks.{k}"))
        if k:
            x = norm(h, tensors[f"amor_pre_norms.{k}.weight"].double(), eps["other"])
        else:
            x = norm(h, norm_f, eps["norm_f"]) if kwargs["residual_mode"] == "h" else h
        entropy = (
            predicted_entropy(x, double(router[k])) if router else normalised_entropy(x, embed)
        )
        tau = threshold(w, kwargs)
        fire = entropy > tau
        if decided is not None:
            tied = (entropy - tau).abs() <= TIE
            ties += int((tied & (fire != decided[k])).sum())
            fire = torch.where(tied, decided[k], fire)
        alpha = w["raw_alpha"].clamp(min=ALPHA_MIN).sigmoid()
        h = h + fire[..., None] * (alpha * attention(x, w, kwargs["n_heads"]))
        entropies.append(entropy)
        fires.append(fire)
    h = norm(h, tensors["final_norm.weight"].double(), eps["other"])
    return Outputs(h @ embed.T, BY, torch.stack(entropies), torch.stack(fires), ties)


def mamba2_layer(h: Tensor, tensors: Weights, i: int, kwargs: Mapping[str, Any]) -> Tensor:
    """One layer of a Mamba2 backbone."""
    w, eps = double(below(tensors, f"ssd_layers.{i}")), MAMBA2_EPS
    shape = kwargs["head_dim"], kwargs["d_state"], eps["mixer"], kwargs["n_groups"]
    h = h + mamba2(norm(h, w["norm.weight"], eps["mixer_norm"]), below(w, "mixer"), *shape)
    x = norm(h, tensors[f"mlp_norms.{i}.weight"].double(), eps["other"])
    return h + swiglu(x, double(below(tensors, f"mlps.{i}")))


def gdn_layer(h: Tensor, tensors: Weights, i: int, kwargs: Mapping[str, Any]) -> Tensor:
    """One layer of a Gated DeltaNet backbone."""
    w, eps = double(below(tensors, f"layers.{i}")), GDN_EPS
    x = norm(h, w["norm_ssm.weight"], eps["mixer_norm"])
    h = h + gated_deltanet(x, below(w, "gdn"), kwargs["head_dim"], eps["mixer"])
    return h + swiglu(norm(h, w["norm_mlp.weight"], eps["other"]), below(w, "mlp"))


def threshold(w: Weights, kwargs: Mapping[str, Any]) -> Tensor:
    """Median + 0.2 std of the entropies of training, or median + 0.03 with offset_mode "fixed"."""
    fixed = kwargs.get("offset_mode") == "fixed"
    return w["gate.running_threshold"] + (FIXED_OFFSET if fixed else KAPPA * w["gate.running_std"])


def normalised_entropy(x: Tensor, embed: Tensor) -> Tensor:
    """[B, T] entropy of the head's next-token distribution after x [B, T, D], over log V."""
    parts = []
    for some in x.flatten(0, 1).split(CHUNK):
        p = (some @ embed.T).softmax(-1)
        parts.append(-(p * (p + LOG_EPS).log()).sum(-1))
    return torch.cat(parts).view(x.shape[:2]) / math.log(len(embed))


def predicted_entropy(x: Tensor, w: Weights) -> Tensor:
    """[B, T] normalised entropy that a router's network predicts from x [B, T, D]."""
    hidden = F.silu(x @ w["fc1.weight"].T + w["fc1.bias"])
    return (hidden @ w["fc2.weight"].T + w["fc2.bias"] + x @ w["skip.weight"].T)[..., 0]


def attention(x: Tensor, w: Weights, heads: int) -> Tensor:
    """Causal attention over all tokens of x [B, T, D], fired or not."""
    names = ("q_proj", "kv_proj.k_proj", "kv_proj.v_proj")
    q, k, v = ((x @ w[f"{n}.weight"].T).unflatten(-1, (heads, -1)).transpose(1, 2) for n in names)
    return causal(rotary(q), rotary(k), v) @ w["out_proj.weight"].T


def rotary(x: Tensor) -> Tensor:
    """Positions into x [B, H, T, d]: the pair (x_i, x_{i + d/2}) is turned by t * base^(-2i/d)."""
    size = x.shape[-1]
    rates = ROPE_BASE ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    angle = torch.arange(x.shape[-2], dtype=torch.float64)[:, None] * rates
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], dim=-1)
