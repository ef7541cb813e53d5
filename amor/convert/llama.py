"""Llama-style Transformers (`LlamaForCausalLM`); keys and values that several heads share are
repeated for each head, which are the same numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from amor.config import Config
from amor.convert.base import TransformersLayout
from amor.convert.settings import Required, Settings, Sizes
from amor.convert.source import SourceTensors
from amor.errors import AmorError

WHOLE_HEADS = ((1, 1.0), "our rotary positions turn whole heads")


class Llama(TransformersLayout):
    """`LlamaForCausalLM` of transformers."""

    kind = "llama"
    title = "a Llama-style Transformer"
    # of old folders; computed from rope_theta
    unused = (r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",)
    model_type = "llama"
    architecture = "LlamaForCausalLM"
    mixer = "attention"
    layers = 32
    norm_eps = ("rms_norm_eps", 1e-6)
    sizes: ClassVar[Sizes] = {
        "vocab": ("vocab_size", 32000),
        "width": ("hidden_size", 4096),
        "d_ff": ("intermediate_size", 11008),
        "context": ("max_position_embeddings", 2048),
    }
    required: ClassVar[Required] = {
        "attention_bias": ((False,), "our projections have no bias"),
        "mlp_bias": ((False,), "our MLP has no bias"),
        "hidden_act": (("silu", "swish"), "our MLP is SwiGLU, which is SiLU"),
        "sliding_window": ((), "our attention sees everything before a token"),
    }
    names: ClassVar[Mapping[str, str]] = {
        r"^embed": "model.embed_tokens",
        r"^head": "lm_head",
        r"^norm_f": "model.norm",
        r"^backbone": "model",
        r"\bmixer_norm": "input_layernorm",
        r"\bmlp_norm": "post_attention_layernorm",
        r"\bmixer\b": "self_attn",
    }

    def config(self, name: str) -> Config:
        s = self.source.settings()
        keys = self.config_keys(s) | {"name": name}
        heads = s.count("num_attention_heads", 32)
        head_size = s.count("head_dim", keys["width"] // heads)
        shared = s.count("num_key_value_heads", heads)
        if heads % shared:
            raise AmorError(f"{s.where}: {heads} heads cannot share {shared} keys and values")
        options = {"head_size": head_size, "rope_theta": theta(s), "width": heads * head_size}
        return Config.from_dict(keys | {"mixers": {"attention": options}}, s.where)

    def adapt(self, tensors: SourceTensors, config: Config) -> None:
        o = config.mixer_options("attention")
        heads = o.width // o.head_size
        shared = self.source.settings().count("num_key_value_heads", heads)
        for i in range(len(config.pattern)):
            for n in "kv":
                name = f"model.layers.{i}.self_attn.{n}_proj.weight"
                t = tensors.take(name, shared * o.head_size, config.width)
                tensors.remaining[name] = repeat_heads(t, shared, heads)

    @classmethod
    def their_tree(cls, config: Config) -> dict[str, Any]:
        tree, o = super().their_tree(config), config.mixer_options("attention")
        heads = (o.width or config.width) // o.head_size
        if config.width % heads:
            raise AmorError(
                f"transformers takes a width that its {heads} heads divide, "
                f"and {config.width} is not: use --to hf"
            )
        tree |= {"num_attention_heads": heads, "num_key_value_heads": heads}
        rope = {"rope_type": "default", "rope_theta": o.rope_theta}
        tree |= {"head_dim": o.head_size, "rope_theta": o.rope_theta, "rope_parameters": rope}
        return tree | {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def repeat_heads(t: Tensor, shared: int, heads: int) -> Tensor:
    """Rows [shared * size, D] as [heads * size, D]: head h of queries reads keys h // (heads /
    shared)."""
    return t.unflatten(0, (shared, -1)).repeat_interleave(heads // shared, 0).flatten(0, 1)


def theta(s: Settings) -> float:
    """The base of plain rotary positions; scaled ones are refused."""
    scaled = "our rotary positions are not scaled, so longer texts would be read differently"
    for key in ("rope_scaling", "rope_parameters"):
        tree = s[key] or {}
        tree = tree if isinstance(tree, dict) else {"rope_type": str(tree)}
        inner = Settings(tree, f"{s.where}: {key}")
        inner.only("rope_type", ("default",), scaled)
        inner.only("type", ("default",), scaled)
        inner.only("partial_rotary_factor", *WHOLE_HEADS)
    s.only("partial_rotary_factor", *WHOLE_HEADS)
    inner = Settings(s["rope_parameters"] or {}, s.where)
    return inner.real("rope_theta", s.real("rope_theta", 10_000.0))
