"""transformers' Mamba2 (`Mamba2ForCausalLM`): its mixers have our names, so tensors are renamed and
nothing else."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from amor.config import Config
from amor.convert.base import CONTEXT, TransformersLayout
from amor.convert.settings import Required, Settings, Sizes
from amor.convert.source import SourceTensors
from amor.errors import AmorError

OLD, NEW = "backbone.embedding.weight", "backbone.embeddings.weight"


class Mamba2HF(TransformersLayout):
    """`Mamba2ForCausalLM` of transformers."""

    kind = "mamba2_hf"
    title = "transformers' Mamba2"
    model_type = "mamba2"
    architecture = "Mamba2ForCausalLM"
    mixer = "mamba2"
    mlp = False
    layers = 64
    norm_eps = ("layer_norm_epsilon", 1e-5)
    sizes: ClassVar[Sizes] = {"vocab": ("vocab_size", 32768), "width": ("hidden_size", 4096)}
    options: ClassVar[Sizes] = {
        "expand": ("expand", 2),
        "head_size": ("head_dim", 64),
        "state_size": ("state_size", 128),
        "groups": ("n_groups", 8),
        "conv": ("conv_kernel", 4),
    }
    required: ClassVar[Required] = {
        "use_bias": ((False,), "our projections have no bias"),
        "hidden_act": (("silu", "swish"), "our Mamba2 uses SiLU"),
    }
    names: ClassVar[Mapping[str, str]] = {
        r"^embed": "backbone.embeddings",
        r"^head": "lm_head",
        r"^norm_f": "backbone.norm_f",
        r"\bmixer_norm": "norm",
    }

    def config(self, name: str) -> Config:
        s = self.source.settings()
        keys = self.config_keys(s) | {"name": name, "d_ff": 0, "context": CONTEXT}
        expand, head_size = s.count("expand", 2), s.count("head_dim", 64)
        refuse_clamped_steps(s, "time_step_limit")
        if s.count("num_heads", 128) * head_size != expand * keys["width"]:
            inner = f"expand {expand} x hidden_size {keys['width']}"
            raise AmorError(f"{s.where}: {s['num_heads']} heads of {head_size} are not {inner}")
        return Config.from_dict(keys, s.where)

    def adapt(self, tensors: SourceTensors, config: Config) -> None:
        if OLD in tensors and NEW not in tensors:  # of folders that were state-spaces' own
            tensors.remaining[NEW] = tensors.remaining.pop(OLD)
        fill_conv_bias(tensors)

    @classmethod
    def their_tree(cls, config: Config) -> dict[str, Any]:
        tree = super().their_tree(config)
        tree["num_heads"] = tree["expand"] * config.width // tree["head_dim"]
        tree["use_conv_bias"] = True
        return tree | {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def fill_conv_bias(tensors: SourceTensors) -> None:
    """A convolution without a bias is one whose bias is 0."""
    for name, t in list(tensors.remaining.items()):
        if name.endswith(".conv1d.weight"):
            bias = name.removesuffix("weight") + "bias"
            tensors.remaining.setdefault(bias, torch.zeros(t.shape[:1]))


def refuse_clamped_steps(s: Settings, key: str) -> None:
    """The steps of our Mamba2 have no bounds but their softplus."""
    limits = s[key]
    if limits is None:
        return
    infinite = ("inf", "Infinity", {"__float__": "Infinity"})
    ends = [math.inf if end in infinite else end for end in limits] if type(limits) is list else []
    numbers = len(ends) == 2 and all(isinstance(end, int | float) for end in ends)
    if not numbers or ends[0] > 0 or ends[1] < math.inf:
        raise AmorError(
            f"{s.where}: {key} is {str(limits)[:80]}; our Mamba2 does not clamp its steps, "
            "so only [0, Infinity] fits"
        )
