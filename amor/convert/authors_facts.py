"""What the authors' code fixes and how it names things: tables that reading and writing share."""

from __future__ import annotations

from typing import Any

FIT_META = "router_fit_meta"  # in KEPT: fit_meta of the router's blocks, which our router has no place for
KEPT = "authors.json"  # in a converted folder of ours: the config.json it came from
BACKBONES = {"mamba2": "mamba2", "gdn": "gated_deltanet"}  # their name -> our mixer
FIRST = {"classic": "plain", "h": "prenorm"}  # residual_mode -> blocks.first
ATTENTION_MODES = ("full_with_mask", "true_sparse")  # two ways to compute the same
DEFAULTS: dict[str, Any] = {
    "attention_mode": "true_sparse",
    "head_dim": 64,
    "d_state": 128,
    "d_conv": 4,
    "expand": 2,
    "n_groups": 1,
    "expand_v": 2.0,
    "vocab_size": 128_256,
    "max_seq_len": 4096,
    "offset_mode": None,  # "fixed": threshold = median + 0.03
}
NEEDED = ("backbone", "n_amor_blocks", "residual_mode", "d_model", "n_layer", "d_ff", "n_heads")

ALPHA_FLOOR = 0.2689414213699951  # sigmoid(-1)
KAPPA, FIXED_OFFSET = 0.2, 0.03  # threshold = median + KAPPA std, or median + FIXED_OFFSET
ROPE_THETA = 10_000.0
EPS: dict[str, dict[str, Any]] = {
    "mamba2": {
        "norm_eps": 1e-5,
        "norm_eps_of": {"mlp_norm": 1e-6, "block": 1e-6, "final_norm": 1e-6},
    },
    "gdn": {"norm_eps": 1e-6, "norm_eps_of": {"mixer": 1e-5}},
}
GATE_OPTIONS = {"kappa": KAPPA, "eta": 0.01, "start": [0.3, 0.1], "update": "forward"}

# our names -> theirs, inside a layer and inside a block
LAYER = {
    "mamba2": {
        "mixer_norm.": "ssd_layers.{i}.norm.",
        "mixer.": "ssd_layers.{i}.mixer.",
        "mlp_norm.": "mlp_norms.{i}.",
        "mlp.": "mlps.{i}.",
    },
    "gdn": {
        "mixer_norm.": "layers.{i}.norm_ssm.",
        "mixer.": "layers.{i}.gdn.",
        "mlp_norm.": "layers.{i}.norm_mlp.",
        "mlp.": "layers.{i}.mlp.",
    },
}
BLOCK = {
    "alpha": "raw_alpha",
    "gate.mu": "gate.running_threshold",
    "gate.sigma": "gate.running_std",
    "attention.q_proj.weight": "q_proj.weight",
    "attention.k_proj.weight": "kv_proj.k_proj.weight",
    "attention.v_proj.weight": "kv_proj.v_proj.weight",
    "attention.o_proj.weight": "out_proj.weight",
}


def gdn_heads(width: int, head_size: int) -> int:
    """Heads of their Gated DeltaNet layers."""
    return int(0.75 * width / head_size)
