"""Llama-style Transformers (`LlamaForCausalLM`); keys and values that heads share are repeated, one a head: the same numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from amor.config import Config
from amor.convert.base import Layout, Settings, head_of, plain_backbone
from amor.convert.peer import by_transformers
from amor.convert.source import Source, Tensors
from amor.errors import AmorError

NAMED = {"embed.weight": "model.embed_tokens.weight", "head.weight": "lm_head.weight", "norm_f.weight": "model.norm.weight"}
PARTS = {".mixer_norm.": ".input_layernorm.", ".mlp_norm.": ".post_attention_layernorm.", ".mixer.": ".self_attn."}


class Llama(Layout):
    kind = "llama"
    title = "a Llama-style Transformer"
    model_type = "llama"
    unused = (r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",)  # of old folders; computed from rope_theta

    @staticmethod
    def recognises(tree: Mapping[str, Any]) -> bool:
        return tree.get("model_type") == "llama"

    @staticmethod
    def config(source: Source, name: str) -> Config:
        s = Settings(source.tree, str(source.folder / "config.json"))
        width, heads = s.count("hidden_size", 4096), s.count("num_attention_heads", 32)
        head_size, shared = s.count("head_dim", width // heads), s.count("num_key_value_heads", heads)
        s.only("attention_bias", (False,), "our projections have no bias")
        s.only("mlp_bias", (False,), "our MLP has no bias")
        s.only("hidden_act", ("silu", "swish"), "our MLP is SwiGLU, which is SiLU")
        s.only("sliding_window", (), "our attention sees everything before a token")
        if heads % shared:
            raise AmorError(f"{s.where}: {heads} heads cannot share {shared} keys and values")
        keys = {
            "name": name,
            "vocab": s.count("vocab_size", 32000),
            "width": width,
            "d_ff": s.count("intermediate_size", 11008),
            "pattern": f"attention x{s.count('num_hidden_layers', 32)}",
            "context": s.count("max_position_embeddings", 2048),
            "norm_eps": s.real("rms_norm_eps", 1e-6),
            "tied": s.flag("tie_word_embeddings", False),
            "mixers": {"attention": {"head_size": head_size, "rope_theta": theta(s), "width": heads * head_size}},
        }
        return Config.from_dict(keys, s.where)

    @staticmethod
    def weights(source: Source, held: Tensors, config: Config) -> dict[str, Tensor]:
        o, width = config.mixer_options("attention"), config.width
        shared = Settings(source.tree, held.where).count("num_key_value_heads", o.width // o.head_size)
        embed = held.take("model.embed_tokens.weight", config.vocab, width)
        found = {"embed.weight": embed, "norm_f.weight": held.take("model.norm.weight", width)}
        for i in range(len(config.pattern)):
            theirs, ours = f"model.layers.{i}", f"backbone.layers.{i}"
            found[f"{ours}.mixer_norm.weight"] = held.take(f"{theirs}.input_layernorm.weight", width)
            found[f"{ours}.mlp_norm.weight"] = held.take(f"{theirs}.post_attention_layernorm.weight", width)
            found[f"{ours}.mixer.q_proj.weight"] = held.take(f"{theirs}.self_attn.q_proj.weight", o.width, width)
            found[f"{ours}.mixer.o_proj.weight"] = held.take(f"{theirs}.self_attn.o_proj.weight", width, o.width)
            for n in "kv":
                t = held.take(f"{theirs}.self_attn.{n}_proj.weight", shared * o.head_size, width).unflatten(0, (shared, -1))
                # head h of queries reads keys h // (heads / shared)
                found[f"{ours}.mixer.{n}_proj.weight"] = t.repeat_interleave(o.width // o.head_size // shared, 0).flatten(0, 1)
            for n in ("gate", "up"):
                found[f"{ours}.mlp.{n}_proj.weight"] = held.take(f"{theirs}.mlp.{n}_proj.weight", config.d_ff, width)
            found[f"{ours}.mlp.down_proj.weight"] = held.take(f"{theirs}.mlp.down_proj.weight", width, config.d_ff)
        return found | head_of(held, config, embed, config.vocab)

    @staticmethod
    def reference(source: Source, tokens: Tensor) -> tuple[Tensor, str]:
        return by_transformers(source.folder, "LlamaForCausalLM", tokens)

    @staticmethod
    def back(config: Config, weights: dict[str, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
        plain_backbone(config, "attention", Llama.title)
        if not config.d_ff:
            raise AmorError(f"{Llama.title} has MLPs, this model has none (d_ff = 0): use --to hf")
        o = config.mixer_options("attention")
        heads = (o.width or config.width) // o.head_size
        if config.width % heads:
            raise AmorError(f"transformers takes a width that its {heads} heads divide, and {config.width} is not: use --to hf")
        kind = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "dtype": "float32"}
        shape = {"hidden_size": config.width, "vocab_size": config.vocab, "num_hidden_layers": len(config.pattern)}
        shape |= {"num_attention_heads": heads, "num_key_value_heads": heads, "head_dim": o.head_size}
        shape |= {"intermediate_size": config.d_ff, "max_position_embeddings": config.context}
        same = {"rms_norm_eps": config.eps("mixer_norm"), "hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
        turns = {"rope_theta": o.rope_theta, "rope_parameters": {"rope_type": "default", "rope_theta": o.rope_theta}}
        ends = {"tie_word_embeddings": config.tied, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
        return kind | shape | same | turns | ends, {_theirs(name): t for name, t in weights.items()}


def theta(s: Settings) -> float:
    """Of plain rotary positions; scaled ones are refused."""
    for key in ("rope_scaling", "rope_parameters"):
        given = s[key] or {}
        inner = Settings(given if isinstance(given, dict) else {"rope_type": str(given)}, f"{s.where}: {key}")
        for kind in ("rope_type", "type"):
            inner.only(kind, ("default",), "our rotary positions are not scaled, so longer texts would be read differently")
        inner.only("partial_rotary_factor", (1, 1.0), "our rotary positions turn whole heads")
    s.only("partial_rotary_factor", (1, 1.0), "our rotary positions turn whole heads")
    inner = Settings(s["rope_parameters"] or {}, s.where)
    return inner.real("rope_theta", s.real("rope_theta", 10_000.0))


def _theirs(name: str) -> str:
    name = NAMED.get(name, name.replace("backbone.", "model."))
    for ours, theirs in PARTS.items():
        name = name.replace(ours, theirs)
    return name
