"""A model's config as transformers keeps one: our config tree is stored, and the keys that other
tools read follow from it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any, ClassVar

import torch
from transformers import PreTrainedConfig

from amor import typed
from amor.config import Config
from amor.errors import AmorError

# a mixer of any other kind is recurrent
LAYER_TYPES = {"attention": "full_attention", "fused": "hybrid"}
# the same for vLLM
BLOCK_TYPES = {"full_attention": "attention", "hybrid": "hybrid", "linear_attention": "mamba"}


class AmorConfig(PreTrainedConfig):
    """config.json of a folder that transformers opens.

    {"model_type": "amor", "amor": {what amor.Config holds}, ...}; keys of DERIVED are read-only.
    """

    model_type = "amor"
    has_no_defaults_at_init: ClassVar[bool] = True  # read by transformers before 5.20
    keys_to_ignore_at_inference: ClassVar[list[str]] = [
        *("past_key_values", "gate_scores", "gate_fires")
    ]

    amor: dict[str, Any] | None = None
    use_cache: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if self.amor is None:
            raise AmorError(
                "AmorConfig: no key 'amor'; make one from a config of ours: "
                "AmorConfig.of(amor.preset(...))"
            )
        object.__setattr__(self, "amor", Config.from_dict(self.amor, "amor").to_dict())
        super().__post_init__(**kwargs)

    @classmethod
    def of(cls, config: Config, **more: Any) -> AmorConfig:
        """The config of one of our models; more: keys of transformers, such as eos_token_id."""
        return cls(amor=config.to_dict(), **more)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """As transformers', but a config.json of amor's own, or a value of another type than
        transformers takes, is refused."""
        if {"pattern", "vocab"} <= config_dict.keys():
            raise AmorError(
                "this config.json is of a folder of amor's own: "
                "open that with amor.load, or amor.hf.export it first"
            )
        check_keys(config_dict, "config.json")
        return super().from_dict(config_dict, **kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoConfig") -> None:
        """Nothing: transformers would copy this file into folders, where the stub was loaded."""

    @property
    def built(self) -> Config:
        """Our config again, checked."""
        return _checked(json.dumps(self.amor))

    def __setattr__(self, key: str, value: Any) -> None:
        if key not in DERIVED:
            super().__setattr__(key, value)
        elif value != getattr(self, key):
            own = f"it follows from this model's own config, which says {getattr(self, key)!r}"
            raise AmorError(f"{key} = {value!r}: {own}")


@dataclass(frozen=True)
class TransformersKeys:
    """Keys of transformers in config.json and generation_config.json, as far as a wrong type would
    end in an exception of its own."""

    use_cache: bool | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None
    dtype: str | None = None  # of torch, e.g. "float16"
    torch_dtype: str | None = None  # its name in older files


def check_keys(tree: Any, where: str) -> None:
    """Refuse a file of transformers whose values have other types than TransformersKeys."""
    if not isinstance(tree, dict):
        raise AmorError(f"{where}: expected an object of keys, not {type(tree).__name__}")
    typed.check_levels(tree, where)
    known = {field.name for field in fields(TransformersKeys)}
    # a caller's own dtype may be torch's, not the name of one
    some = {k: v for k, v in tree.items() if k in known and not isinstance(v, torch.dtype)}
    keys = typed.convert(TransformersKeys, some, where)
    for name in (keys.dtype, keys.torch_dtype):
        dtype = getattr(torch, (name or "float32").removeprefix("torch."), None)
        if name != "auto" and not isinstance(dtype, torch.dtype):
            raise AmorError(f"{where}: dtype is {name!r}; torch has none of that name")


@lru_cache(maxsize=64)
def _checked(tree: str) -> Config:
    return Config.from_dict(json.loads(tree), "amor")


def layer_types(config: Config) -> list[str]:
    """One per layer, then one per gated block: those hold keys and values too."""
    layers = [LAYER_TYPES.get(kind, "linear_attention") for kind in config.pattern]
    return layers + ["full_attention"] * config.blocks.count


def attention_heads(config: Config) -> tuple[int, int]:
    """Size and number of attention heads: of the gated blocks, or else of the backbone.

    The number is 0 where there is neither.
    """
    if config.blocks.count:
        return config.blocks.head_size, config.width // config.blocks.head_size
    for kind in ("attention", "fused"):
        if kind in config.pattern:
            options = config.mixer_options(kind)
            options = options.attention(config.width) if kind == "fused" else options
            return options.head_size, (options.width or config.width) // options.head_size
    return config.mixer_options(config.pattern[0]).head_size, 0


DERIVED: dict[str, Callable[[Config], Any]] = {
    "vocab_size": lambda config: config.vocab,
    "hidden_size": lambda config: config.width,
    "intermediate_size": lambda config: config.d_ff,
    "layer_types": layer_types,
    "layers_block_type": lambda config: [BLOCK_TYPES[kind] for kind in layer_types(config)],
    "num_hidden_layers": lambda config: len(config.pattern) + config.blocks.count,
    "head_dim": lambda config: attention_heads(config)[0],
    "num_attention_heads": lambda config: attention_heads(config)[1],
    "num_key_value_heads": lambda config: attention_heads(config)[1],
    # tokens of a training window; nothing in the model stops a longer text
    "max_position_embeddings": lambda config: config.context,
    "rms_norm_eps": lambda config: config.norm_eps,
    "tie_word_embeddings": lambda config: config.tied,
    "mamba_chunk_size": lambda config: 256,  # of vLLM's recurrent kernels; ours take any cut
}


def _derived(derive: Callable[[Config], Any]) -> property:
    return property(lambda self: derive(self.built))


for _name, _derive in DERIVED.items():
    setattr(AmorConfig, _name, _derived(_derive))
