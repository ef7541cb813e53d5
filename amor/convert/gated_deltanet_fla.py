"""fla's Gated DeltaNet (`GatedDeltaNetForCausalLM`): our names, but for its three convolutions,
which are one here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from amor.config import Config
from amor.convert.base import Outputs, TransformersLayout, Written
from amor.convert.settings import Required, Settings, Sizes
from amor.convert.source import SourceTensors
from amor.convert.written import WRITTEN, below, double, gated_deltanet, norm, swiglu
from amor.errors import AmorError

FIRST_MLP = "model.layers.0.mlp.gate_proj.weight"


class GatedDeltaNetFLA(TransformersLayout):
    """`GatedDeltaNetForCausalLM` of fla."""

    kind = "gated_deltanet_fla"
    title = "fla's Gated DeltaNet"
    model_type = "gated_deltanet"
    architecture = "GatedDeltaNetForCausalLM"
    mixer = "gated_deltanet"
    layers = 21
    norm_eps = ("norm_eps", 1e-6)
    sizes: ClassVar[Sizes] = {
        "vocab": ("vocab_size", 32000),
        "width": ("hidden_size", 2048),
        "d_ff": ("intermediate_size", None),
        "context": ("max_position_embeddings", 2048),
    }
    options: ClassVar[Sizes] = {
        "head_size": ("head_dim", 256),
        "heads": ("num_heads", 6),
        "conv": ("conv_size", 4),
    }
    required: ClassVar[Required] = {
        "use_gate": ((True,), "our mixer has an output gate"),
        "use_short_conv": ((True,), "our mixer has short convolutions"),
        "allow_neg_eigval": ((False,), "beta of our mixer lies in 0 .. 1"),
        "hidden_act": (("swish", "silu"), "our MLP is SwiGLU"),
    }
    names: ClassVar[Mapping[str, str]] = {
        r"^embed": "model.embeddings",
        r"^head": "lm_head",
        r"^norm_f": "model.norm",
        r"^backbone": "model",
        r"\bmixer_norm": "attn_norm",
        r"\bmixer\b": "attn",
    }

    def config(self, name: str) -> Config:
        s = self.source.settings()
        if s["attn"]:
            raise AmorError(
                f"{s.where}: attn is given: attention layers of fla have another form than ours"
            )
        if s["intermediate_size"] is None:  # fla rounds the default; the tensor has the size
            size = {"intermediate_size": self.source.tensors().rows(FIRST_MLP)}
            s = Settings(self.source.tree | size, s.where)
        keys = self.config_keys(s) | {"name": name}
        options = keys["mixers"]["gated_deltanet"]
        why = "our mixer has as many heads of values as of keys"
        s.only("num_v_heads", (options["heads"],), why)
        options["expand_v"] = whole_expand_v(s)
        return Config.from_dict(keys, s.where)

    def adapt(self, tensors: SourceTensors, config: Config) -> None:
        join_convolutions(tensors, config, "model.layers.{i}.attn")

    @torch.no_grad()
    def outputs(self, tokens: Tensor, decided: Tensor | None = None) -> Outputs:
        s = self.source.settings()
        eps, head_size = s.real("norm_eps", 1e-6), s.count("head_dim", 256)
        w = double(self.source.tensors().remaining)
        h = w["model.embeddings.weight"][tokens]
        for i in range(s.count("num_hidden_layers", 21)):
            layer = below(w, f"model.layers.{i}")
            x = norm(h, layer["attn_norm.weight"], eps)
            h = h + gated_deltanet(x, below(layer, "attn"), head_size, eps)
            h = h + swiglu(norm(h, layer["mlp_norm.weight"], eps), below(layer, "mlp"))
        tied = s.flag("tie_word_embeddings", False)
        head = w["model.embeddings.weight" if tied else "lm_head.weight"]
        return Outputs(norm(h, w["model.norm.weight"], eps) @ head.T, WRITTEN)

    @classmethod
    def back(cls, config: Config, weights: dict[str, Tensor]) -> Written:
        tree, tensors = super().back(config, weights)
        o = config.mixer_options("gated_deltanet")
        tree |= {"num_heads": o.count(config.width), "num_v_heads": None, "attn": None}
        tree["expand_v"] = float(o.expand_v)
        return tree, split_convolutions(tensors, config)


def whole_expand_v(s: Settings) -> int:
    """Size of a value over the size of a key, which fla keeps as a float."""
    expand = s.real("expand_v", 2.0)
    if expand != int(expand):
        what = "a value of ours is a whole number of keys long"
        raise AmorError(f"{s.where}: expand_v is {expand:g}; {what}")
    return int(expand)


def convolution_sizes(config: Config) -> list[int]:
    """Channels of the convolutions of queries, keys and values."""
    o = config.mixer_options("gated_deltanet")
    keys = o.count(config.width) * o.head_size
    return [keys, keys, keys * o.expand_v]


def join_convolutions(tensors: SourceTensors, config: Config, mixer: str) -> None:
    """Three convolutions as the one of ours; mixer: the name of a layer's mixer, with "{i}"."""
    taps = config.mixer_options("gated_deltanet").conv
    sizes = dict(zip("qkv", convolution_sizes(config), strict=True))
    for i in range(len(config.pattern)):
        at = mixer.format(i=i)
        parts = [tensors.take(f"{at}.{n}_conv1d.weight", sizes[n], 1, taps) for n in "qkv"]
        tensors.remaining[f"{at}.conv1d.weight"] = torch.cat(parts)


def split_convolutions(tensors: dict[str, Tensor], config: Config) -> dict[str, Tensor]:
    """The one convolution of ours as three."""
    split = {}
    for name, t in tensors.items():
        if name.endswith(".conv1d.weight"):
            for n, part in zip("qkv", t.split(convolution_sizes(config)), strict=True):
                split[name.replace(".conv1d.", f".{n}_conv1d.")] = part.contiguous()
        else:
            split[name] = t
    return split
