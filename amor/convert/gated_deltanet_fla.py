"""fla's Gated DeltaNet (`GatedDeltaNetForCausalLM`): our names, but for its three convolutions, which are one here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from amor.config import Config
from amor.convert.base import Layout, Settings, head_of, plain_backbone
from amor.convert.source import Source, Tensors
from amor.convert.written import WRITTEN, below, gated_deltanet, norm
from amor.errors import AmorError

SAME = ("q_proj.weight", "k_proj.weight", "v_proj.weight", "g_proj.weight", "a_proj.weight", "b_proj.weight", "o_proj.weight")
MLP = ("gate_proj.weight", "up_proj.weight", "down_proj.weight")


class GatedDeltaNetFLA(Layout):
    kind = "gated_deltanet_fla"
    title = "fla's Gated DeltaNet"
    model_type = "gated_deltanet"

    @staticmethod
    def recognises(tree: Mapping[str, Any]) -> bool:
        return tree.get("model_type") == "gated_deltanet"

    @staticmethod
    def config(source: Source, name: str) -> Config:
        s = Settings(source.tree, str(source.folder / "config.json"))
        heads, expand = s.count("num_heads", 6), s.real("expand_v", 2.0)
        s.only("use_gate", (True,), "our mixer has an output gate")
        s.only("use_short_conv", (True,), "our mixer has short convolutions")
        s.only("allow_neg_eigval", (False,), "beta of our mixer lies in 0 .. 1")
        s.only("num_v_heads", (heads,), "our mixer has as many heads of values as of keys")
        s.only("hidden_act", ("swish", "silu"), "our MLP is SwiGLU")
        if s["attn"]:
            raise AmorError(f"{s.where}: attn is given: attention layers of fla have another form than ours")
        if expand != int(expand):
            raise AmorError(f"{s.where}: expand_v is {expand:g}; a value of ours is a whole number of keys long")
        options = {
            "head_size": s.count("head_dim", 256),
            "heads": heads,
            "expand_v": int(expand),
            "conv": s.count("conv_size", 4),
        }
        keys = {
            "name": name,
            "vocab": s.count("vocab_size", 32000),
            "width": s.count("hidden_size", 2048),
            # fla rounds it where it is not given; the tensor tells
            "d_ff": s.count("intermediate_size", None if s["intermediate_size"] else source.tensors().rows(FIRST_MLP)),
            "pattern": f"gated_deltanet x{s.count('num_hidden_layers', 21)}",
            "context": s.count("max_position_embeddings", 2048),
            "norm_eps": s.real("norm_eps", 1e-6),
            "tied": s.flag("tie_word_embeddings", False),
            "mixers": {"gated_deltanet": options},
        }
        return Config.from_dict(keys, s.where)

    @staticmethod
    def weights(source: Source, held: Tensors, config: Config) -> dict[str, Tensor]:
        width, d_ff, o = config.width, config.d_ff, config.mixer_options("gated_deltanet")
        keys, heads = o.heads * o.head_size, o.heads
        values = keys * o.expand_v
        embed = held.take("model.embeddings.weight", config.vocab, width)
        found = {"embed.weight": embed, "norm_f.weight": held.take("model.norm.weight", width)}
        sizes = {"q": keys, "k": keys, "v": values, "g": values, "a": heads, "b": heads}
        for i in range(len(config.pattern)):
            theirs, ours = f"model.layers.{i}", f"backbone.layers.{i}"
            found[f"{ours}.mixer_norm.weight"] = held.take(f"{theirs}.attn_norm.weight", width)
            found[f"{ours}.mlp_norm.weight"] = held.take(f"{theirs}.mlp_norm.weight", width)
            for name in SAME:
                shape = (width, values) if name == "o_proj.weight" else (sizes[name[0]], width)
                found[f"{ours}.mixer.{name}"] = held.take(f"{theirs}.attn.{name}", *shape)
            taps = [held.take(f"{theirs}.attn.{n}_conv1d.weight", sizes[n], 1, o.conv) for n in "qkv"]
            found[f"{ours}.mixer.conv1d.weight"] = torch.cat(taps)
            for name, size in {"A_log": heads, "dt_bias": heads, "o_norm.weight": values // heads}.items():
                found[f"{ours}.mixer.{name}"] = held.take(f"{theirs}.attn.{name}", size)
            for name in MLP:
                shape = (width, d_ff) if name == "down_proj.weight" else (d_ff, width)
                found[f"{ours}.mlp.{name}"] = held.take(f"{theirs}.mlp.{name}", *shape)
        return found | head_of(held, config, embed, config.vocab)

    @staticmethod
    @torch.no_grad()
    def reference(source: Source, tokens: Tensor) -> tuple[Tensor, str]:
        s = Settings(source.tree, str(source.folder / "config.json"))
        eps, head_size = s.real("norm_eps", 1e-6), s.count("head_dim", 256)
        w = {name: t.double() for name, t in source.tensors().held.items()}
        h = w["model.embeddings.weight"][tokens]
        for i in range(s.count("num_hidden_layers", 21)):
            layer = below(w, f"model.layers.{i}")
            h = h + gated_deltanet(norm(h, layer["attn_norm.weight"], eps), below(layer, "attn"), head_size, eps)
            x, mlp = norm(h, layer["mlp_norm.weight"], eps), below(layer, "mlp")
            h = h + (F.silu(x @ mlp["gate_proj.weight"].T) * (x @ mlp["up_proj.weight"].T)) @ mlp["down_proj.weight"].T
        head = w["model.embeddings.weight"] if s.flag("tie_word_embeddings", False) else w["lm_head.weight"]
        return norm(h, w["model.norm.weight"], eps) @ head.T, WRITTEN

    @staticmethod
    def back(config: Config, weights: dict[str, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
        plain_backbone(config, "gated_deltanet", GatedDeltaNetFLA.title)
        if not config.d_ff:
            raise AmorError(f"{GatedDeltaNetFLA.title} has MLPs, this model has none (d_ff = 0): use --to hf")
        o, heads = config.mixer_options("gated_deltanet"), config.mixer_options("gated_deltanet").count(config.width)
        kind = {"model_type": "gated_deltanet", "architectures": ["GatedDeltaNetForCausalLM"], "dtype": "float32"}
        shape: dict[str, Any] = {
            "hidden_size": config.width,
            "vocab_size": config.vocab,
            "num_hidden_layers": len(config.pattern),
        }
        shape |= {"num_heads": heads, "num_v_heads": None, "head_dim": o.head_size, "expand_v": float(o.expand_v)}
        shape |= {"conv_size": o.conv, "intermediate_size": config.d_ff, "max_position_embeddings": config.context}
        same = {"norm_eps": config.eps("mixer"), "use_gate": True, "use_short_conv": True, "allow_neg_eigval": False}
        ends = {"hidden_act": "swish", "attn": None, "tie_word_embeddings": config.tied}
        keys = heads * o.head_size
        return kind | shape | same | ends, dict(_renamed(weights, [keys, keys, keys * o.expand_v]))


FIRST_MLP = "model.layers.0.mlp.gate_proj.weight"
NAMED = {"embed.weight": "model.embeddings.weight", "head.weight": "lm_head.weight", "norm_f.weight": "model.norm.weight"}


def _renamed(weights: dict[str, Tensor], sizes: list[int]) -> Any:
    for name, t in weights.items():
        theirs = name.replace("backbone.", "model.").replace(".mixer_norm.", ".attn_norm.").replace(".mixer.", ".attn.")
        if name.endswith(".conv1d.weight"):
            for n, part in zip("qkv", t.split(sizes), strict=True):
                yield theirs.replace(".conv1d.", f".{n}_conv1d."), part.contiguous()
        else:
            yield NAMED.get(name, theirs), t
