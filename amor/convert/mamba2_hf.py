"""transformers' Mamba2 (`Mamba2ForCausalLM`): the names of its mixers are ours, so tensors are renamed and nothing else."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from amor.config import Config
from amor.convert.base import CONTEXT, Layout, Settings, head_of, plain_backbone
from amor.convert.mamba2 import mixer
from amor.convert.peer import by_transformers
from amor.convert.source import Source, Tensors
from amor.errors import AmorError


class Mamba2HF(Layout):
    kind = "mamba2_hf"
    title = "transformers' Mamba2"
    model_type = "mamba2"

    @staticmethod
    def recognises(tree: Mapping[str, Any]) -> bool:
        return tree.get("model_type") == "mamba2"

    @staticmethod
    def config(source: Source, name: str) -> Config:
        s = Settings(source.tree, str(source.folder / "config.json"))
        width, expand, head_size = s.count("hidden_size", 4096), s.count("expand", 2), s.count("head_dim", 64)
        s.only("use_bias", (False,), "our projections have no bias")
        s.only("hidden_act", ("silu", "swish"), "our Mamba2 uses SiLU")
        limits(s, "time_step_limit")
        if s.count("num_heads", 128) * head_size != expand * width:
            raise AmorError(f"{s.where}: {s['num_heads']} heads of {head_size} are not expand {expand} x hidden_size {width}")
        options = {"expand": expand, "head_size": head_size, "state_size": s.count("state_size", 128)}
        options |= {"groups": s.count("n_groups", 8), "conv": s.count("conv_kernel", 4)}
        keys = {
            "name": name,
            "vocab": s.count("vocab_size", 32768),
            "width": width,
            "d_ff": 0,
            "pattern": f"mamba2 x{s.count('num_hidden_layers', 64)}",
            "context": CONTEXT,
            "norm_eps": s.real("layer_norm_epsilon", 1e-5),
            "tied": s.flag("tie_word_embeddings", False),
            "mixers": {"mamba2": options},
        }
        return Config.from_dict(keys, s.where)

    @staticmethod
    def weights(source: Source, held: Tensors, config: Config) -> dict[str, Tensor]:
        old = "backbone.embedding.weight"  # so in folders that state-spaces' own were renamed from
        embed = held.take(old if old in held else "backbone.embeddings.weight", config.vocab, config.width)
        found = {"embed.weight": embed, "norm_f.weight": held.take("backbone.norm_f.weight", config.width)}
        for i in range(len(config.pattern)):
            ours, theirs = f"backbone.layers.{i}", f"backbone.layers.{i}"
            found[f"{ours}.mixer_norm.weight"] = held.take(f"{theirs}.norm.weight", config.width)
            found |= mixer(held, config, f"{theirs}.mixer", f"{ours}.mixer")
        return found | head_of(held, config, embed, config.vocab)

    @staticmethod
    def reference(source: Source, tokens: Tensor) -> tuple[Tensor, str]:
        return by_transformers(source.folder, "Mamba2ForCausalLM", tokens)

    @staticmethod
    def back(config: Config, weights: dict[str, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
        plain_backbone(config, "mamba2", Mamba2HF.title)
        if config.d_ff:
            raise AmorError(f"{Mamba2HF.title} has no MLPs, this model has MLPs of d_ff {config.d_ff}: use --to hf")
        o = config.mixer_options("mamba2")
        shape = {"hidden_size": config.width, "vocab_size": config.vocab, "num_hidden_layers": len(config.pattern)}
        shape |= {"num_heads": o.expand * config.width // o.head_size, "head_dim": o.head_size, "expand": o.expand}
        shape |= {"state_size": o.state_size, "n_groups": o.groups, "conv_kernel": o.conv}
        kind = {"model_type": "mamba2", "architectures": ["Mamba2ForCausalLM"], "dtype": "float32"}
        same = {"layer_norm_epsilon": config.eps("mixer"), "use_bias": False, "use_conv_bias": True, "hidden_act": "silu"}
        ends = {"tie_word_embeddings": config.tied, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
        named = {
            "embed.weight": "backbone.embeddings.weight",
            "head.weight": "lm_head.weight",
            "norm_f.weight": "backbone.norm_f.weight",
        }
        return kind | shape | same | ends, {
            named.get(name, name.replace(".mixer_norm.", ".norm.")): t for name, t in weights.items()
        }


def limits(s: Settings, key: str) -> None:
    """The steps of our Mamba2 have no bounds but their softplus."""
    given = s[key]
    if given is None:
        return
    ends = (
        [math.inf if end in ("inf", "Infinity", {"__float__": "Infinity"}) else end for end in given]
        if isinstance(given, list)
        else []
    )
    if len(ends) != 2 or not all(isinstance(end, int | float) for end in ends) or ends[0] > 0 or ends[1] < math.inf:
        raise AmorError(f"{s.where}: {key} is {str(given)[:80]}; our Mamba2 does not clamp its steps, so only [0, Infinity] fits")
