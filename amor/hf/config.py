"""A model's config as transformers keeps one: our config tree is stored, everything other tools ask for is read off it."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any, ClassVar

from transformers import PreTrainedConfig

from amor.config import Config
from amor.errors import AmorError

LAYER_TYPES = {"attention": "full_attention", "fused": "hybrid"}  # a mixer of any other kind is recurrent
BLOCK_TYPES = {"full_attention": "attention", "hybrid": "hybrid", "linear_attention": "mamba"}  # in the words of vLLM
CHUNK = 256  # of a prompt in vLLM's recurrent kernels; ours take any cut


class AmorConfig(PreTrainedConfig):
    """config.json of a folder that transformers opens: {"model_type": "amor", "amor": {what amor.Config holds}, ...}."""

    model_type = "amor"
    has_no_defaults_at_init: ClassVar[bool] = True  # transformers before 5.20 asks
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values", "gate_scores", "gate_fires"]

    amor: dict[str, Any] | None = None
    use_cache: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if self.amor is None:
            raise AmorError("AmorConfig: no key 'amor'; make one from a config of ours: AmorConfig.of(amor.preset(...))")
        object.__setattr__(self, "amor", Config.from_dict(self.amor, "amor").to_dict())
        super().__post_init__(**kwargs)

    @classmethod
    def of(cls, config: Config, **more: Any) -> AmorConfig:
        """The config of one of our models; more: keys of transformers, such as eos_token_id."""
        return cls(amor=config.to_dict(), **more)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        if {"pattern", "vocab"} <= config_dict.keys():
            raise AmorError("this config.json is of a folder of amor's own: open that with amor.load, or amor.hf.export it first")
        return super().from_dict(config_dict, **kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoConfig") -> None:
        """Nothing: transformers calls it where a folder's stub was loaded, and would then copy this file into folders."""

    @property
    def built(self) -> Config:
        """Our config again, checked."""
        return _checked(json.dumps(self.amor))

    def __setattr__(self, key: str, value: Any) -> None:
        if key in DERIVED:
            if value == getattr(self, key):
                return
            raise AmorError(f"{key} = {value!r}: it follows from this model's own config, which says {getattr(self, key)!r}")
        super().__setattr__(key, value)

    @property
    def vocab_size(self) -> int:
        return self.built.vocab

    @property
    def hidden_size(self) -> int:
        return self.built.width

    @property
    def intermediate_size(self) -> int:
        return self.built.d_ff

    @property
    def layer_types(self) -> list[str]:
        """One a layer, then one a gated block: those hold keys and values too."""
        config = self.built
        layers = [LAYER_TYPES.get(kind, "linear_attention") for kind in config.pattern]
        return layers + ["full_attention"] * config.blocks.count

    @property
    def layers_block_type(self) -> list[str]:
        return [BLOCK_TYPES[kind] for kind in self.layer_types]

    @property
    def num_hidden_layers(self) -> int:
        return len(self.built.pattern) + self.built.blocks.count

    @property
    def head_dim(self) -> int:
        return _heads(self.built)[0]

    @property
    def num_attention_heads(self) -> int:
        """Of the gated blocks, or else of the attention in the backbone; 0 where there is neither."""
        return _heads(self.built)[1]

    @property
    def num_key_value_heads(self) -> int:
        return self.num_attention_heads

    @property
    def max_position_embeddings(self) -> int:
        """Tokens of a training window; nothing in the model stops a longer text."""
        return self.built.context

    @property
    def rms_norm_eps(self) -> float:
        return self.built.norm_eps

    @property
    def tie_word_embeddings(self) -> bool:
        return self.built.tied

    @property
    def mamba_chunk_size(self) -> int:
        return CHUNK


DERIVED = frozenset(name for name, held in vars(AmorConfig).items() if isinstance(held, property))


@lru_cache(maxsize=64)
def _checked(tree: str) -> Config:
    return Config.from_dict(json.loads(tree), "amor")


def _heads(config: Config) -> tuple[int, int]:
    """Size and number of attention heads."""
    if config.blocks.count:
        return config.blocks.head_size, config.width // config.blocks.head_size
    for kind in ("attention", "fused"):
        if kind in config.pattern:
            options = config.mixer_options(kind)
            options = options.attention(config.width) if kind == "fused" else options
            return options.head_size, (options.width or config.width) // options.head_size
    return config.mixer_options(config.pattern[0]).head_size, 0
