"""state-spaces' Mamba2 (`mamba_ssm`): config.json with d_model, n_layer and ssm_cfg, weights in pytorch_model.bin.

Its vocabulary is padded to a multiple of `pad_vocab_size_multiple`. The rows of padding are no tokens: they are cut off, so that
entropy is a share of the logarithm of the true vocabulary and no probability falls on them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from amor.config import Config
from amor.convert.base import CONTEXT, Layout, Settings, head_of
from amor.convert.mamba2 import mixer
from amor.convert.mamba2_hf import limits
from amor.convert.source import Source, Tensors
from amor.convert.written import WRITTEN, Mamba2Shape, below, mamba2, norm
from amor.errors import AmorError, nearest

EPS = 1e-5  # of every norm; the published config does not name it
SHAPES = {"d_state": 128, "d_conv": 4, "expand": 2, "headdim": 64, "ngroups": 1}
# how weights were first drawn and how fast kernels go: nothing of what the model is
FREE = ("layer", "A_init_range", "dt_min", "dt_max", "dt_init_floor", "conv_init", "chunk_size", "use_mem_eff_path", "conv_bias")


class Mamba2SSM(Layout):
    kind = "mamba2_ssm"
    title = "state-spaces' Mamba2"

    @staticmethod
    def recognises(tree: Mapping[str, Any]) -> bool:
        return "model_type" not in tree and {"d_model", "n_layer"} <= tree.keys()

    @staticmethod
    def config(source: Source, name: str) -> Config:
        s, inner = settings(source)
        s.only("rms_norm", (True,), "our norms are RMSNorm")
        s.only("attn_layer_idx", ([],), "attention layers of mamba_ssm have another form than ours")
        vocab = s.count("vocab_size", 50277)
        keys = {
            "name": name,
            "vocab": vocab,
            "width": s.count("d_model"),
            "d_ff": 0 if not s["d_intermediate"] else mlp_width(source, s),
            "pattern": f"mamba2 x{s.count('n_layer')}",
            "context": CONTEXT,
            "norm_eps": EPS,
            "tied": s.flag("tie_embeddings", True),
            "mixers": {
                "mamba2": {
                    "expand": inner.count("expand", 2),
                    "head_size": inner.count("headdim", 64),
                    "state_size": inner.count("d_state", 128),
                    "groups": 1,
                    "conv": inner.count("d_conv", 4),
                }
            },
        }
        return Config.from_dict(keys, s.where)

    @staticmethod
    def weights(source: Source, held: Tensors, config: Config) -> dict[str, Tensor]:
        s, _ = settings(source)
        rows = padded(s)
        whole = held.take("backbone.embedding.weight", rows, config.width)
        found = {"embed.weight": whole[: config.vocab], "norm_f.weight": held.take("backbone.norm_f.weight", config.width)}
        for i in range(len(config.pattern)):
            at = f"backbone.layers.{i}"
            found[f"{at}.mixer_norm.weight"] = held.take(f"{at}.norm.weight", config.width)
            found |= mixer(held, config, f"{at}.mixer", f"{at}.mixer")
            if config.d_ff:
                up, gate = held.take(f"{at}.mlp.fc1.weight", 2 * config.d_ff, config.width).chunk(2)
                found |= {f"{at}.mlp.up_proj.weight": up, f"{at}.mlp.gate_proj.weight": gate}
                found[f"{at}.mlp.down_proj.weight"] = held.take(f"{at}.mlp.fc2.weight", config.width, config.d_ff)
                found[f"{at}.mlp_norm.weight"] = held.take(f"{at}.norm2.weight", config.width)
        own = head_of(held, config, whole, rows)
        return found | {name: t[: config.vocab] for name, t in own.items()}

    @staticmethod
    @torch.no_grad()
    def reference(source: Source, tokens: Tensor) -> tuple[Tensor, str]:
        s, inner = settings(source)
        w = {name: t.double() for name, t in source.tensors().held.items()}
        shape = Mamba2Shape(inner.count("headdim", 64), inner.count("d_state", 128), EPS)
        h = w["backbone.embedding.weight"][tokens]
        for i in range(s.count("n_layer")):
            layer = below(w, f"backbone.layers.{i}")
            h = h + mamba2(norm(h, layer["norm.weight"], EPS), below(layer, "mixer"), shape)
            if "mlp.fc1.weight" in layer:
                y, gate = (norm(h, layer["norm2.weight"], EPS) @ layer["mlp.fc1.weight"].T).chunk(2, dim=-1)
                h = h + (y * torch.nn.functional.silu(gate)) @ layer["mlp.fc2.weight"].T
        h = norm(h, w["backbone.norm_f.weight"], EPS)
        head = w["backbone.embedding.weight"] if s.flag("tie_embeddings", True) else w["lm_head.weight"]
        return h @ head.T, WRITTEN


def settings(source: Source) -> tuple[Settings, Settings]:
    """Of the model and of its mixers; what our mixer cannot do is refused."""
    s = Settings(source.tree, str(source.folder / "config.json"))
    tree = s["ssm_cfg"] or {}
    if not isinstance(tree, dict) or tree.get("layer") != "Mamba2":
        raise AmorError(
            f"{s.where}: ssm_cfg.layer is {str(tree)[:80]}; only Mamba2 is read, and without it mamba_ssm means Mamba1"
        )
    inner = Settings(tree, f"{s.where}: ssm_cfg")
    inner.only("ngroups", (1,), "with several groups mamba_ssm norms each by itself, ours all together")
    inner.only("rmsnorm", (True,), "our mixer norms before its last projection")
    inner.only("norm_before_gate", (False,), "our mixer gates first")
    inner.only("bias", (False,), "our projections have no bias")
    inner.only("D_has_hdim", (False,), "our D is one number a head")
    inner.only("d_ssm", (None, inner.count("expand", 2) * s.count("d_model")), "all channels of our mixer are of the recurrence")
    inner.only("activation", ("silu", "swish"), "our mixer uses SiLU")
    limits(inner, "dt_limit")
    known = (*SHAPES, *FREE, "rmsnorm", "norm_before_gate", "bias", "D_has_hdim", "d_ssm", "activation", "dt_limit")
    for key in tree.keys() - set(known):
        raise AmorError(f"{inner.where}: no key {key!r} is known; {nearest(str(key), known)}")
    return s, inner


def mlp_width(source: Source, s: Settings) -> int:
    """mamba_ssm rounds it up; the tensor tells."""
    s.count("d_intermediate")
    return source.tensors().rows("backbone.layers.0.mlp.fc1.weight") // 2


def padded(s: Settings) -> int:
    """Rows of the embedding."""
    vocab, multiple = s.count("vocab_size", 50277), s.count("pad_vocab_size_multiple", 8)
    return -(-vocab // multiple) * multiple
