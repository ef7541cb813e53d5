"""Constants and names of the authors' code: tables that reading and writing share."""

from __future__ import annotations

from typing import Any

KEPT = "authors.json"  # in a converted folder of ours: the config.json it came from
FIT_META = "router_fit_meta"  # key of KEPT: fit_meta of the router's blocks, which our router lacks
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

# keys of our config, and options of our mixers -> keys of model_kwargs
SIZES = {"vocab": "vocab_size", "width": "d_model", "d_ff": "d_ff", "context": "max_seq_len"}
OPTIONS = {
    "mamba2": {
        "head_size": "head_dim",
        "conv": "d_conv",
        "state_size": "d_state",
        "groups": "n_groups",
        "expand": "expand",
    },
    "gdn": {"head_size": "head_dim", "conv": "d_conv"},
}

ALPHA_FLOOR = 0.2689414213699951  # sigmoid(-1)
KAPPA, FIXED_OFFSET = 0.2, 0.03  # threshold = median + KAPPA std, or median + FIXED_OFFSET
FIXED_STD = FIXED_OFFSET / KAPPA  # the std that gives the same threshold as a fixed offset
ROPE_THETA = 10_000.0
EPS: dict[str, dict[str, Any]] = {
    "mamba2": {
        "norm_eps": 1e-5,
        "norm_eps_of": {"mlp_norm": 1e-6, "block": 1e-6, "final_norm": 1e-6},
    },
    "gdn": {"norm_eps": 1e-6, "norm_eps_of": {"mixer": 1e-5}},
}
GATE_OPTIONS = {"kappa": KAPPA, "eta": 0.01, "start": [0.3, 0.1], "update": "forward"}

# patterns in our tensor names -> theirs, in this order
LAYER_NAMES = {
    "mamba2": {
        r"^backbone\.layers\.(\d+)\.mixer_norm\.": r"ssd_layers.\1.norm.",
        r"^backbone\.layers\.(\d+)\.mixer\.": r"ssd_layers.\1.mixer.",
        r"^backbone\.layers\.(\d+)\.mlp_norm\.": r"mlp_norms.\1.",
        r"^backbone\.layers\.(\d+)\.mlp\.": r"mlps.\1.",
    },
    "gdn": {
        r"^backbone\.": "",
        r"\bmixer_norm\b": "norm_ssm",
        r"\bmixer\b": "gdn",
        r"\bmlp_norm\b": "norm_mlp",
    },
}
BLOCK_NAMES = {
    r"^head\b": "lm_head",
    r"^blocks\.(\d+)\.norm\.": r"amor_pre_norms.\1.",
    r"^blocks\.": "amor_blocks.",
    r"\.alpha$": ".raw_alpha",
    r"\.gate\.mu$": ".gate.running_threshold",
    r"\.gate\.sigma$": ".gate.running_std",
    r"\.attention\.q_proj\b": ".q_proj",
    r"\.attention\.([kv])_proj\b": r".kv_proj.\1_proj",
    r"\.attention\.o_proj\b": ".out_proj",
}


def gdn_heads(width: int, head_size: int) -> int:
    """Heads of their Gated DeltaNet layers."""
    return int(0.75 * width / head_size)
