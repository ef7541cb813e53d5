"""The contract of a layout: what its config.json means, which of its tensors is which of ours, and who can run the source.

A layout refuses what our skeleton cannot do, each thing with its reason, before a tensor is read. Numbers are never changed:
tensors are renamed, cut, joined or repeated. `reference` runs the published folder by its own library, or, where that cannot run
here, by the recurrence written out; every conversion ends with a comparison with it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from amor.config import Config
from amor.convert.source import Source, Tensors
from amor.errors import AmorError

CONTEXT = 2048  # of a recurrent source, whose config names no length: what the published ones were trained at

NO_TOKENIZER = "no tokenizer.json lies there: text cannot be read or written until one does"


@dataclass(frozen=True)
class Outputs:
    """What a model makes of tokens [B, T], and by what it was run; gates where they are known."""

    logits: Tensor  # [B, T, V]
    by: str
    entropy: Tensor | None = None  # [K, B, T] over log V
    fire: Tensor | None = None  # [K, B, T]
    ties: int = 0  # decisions within rounding of a threshold, taken over from the other model


class Layout:
    kind: str
    title: ClassVar[str]  # for people
    model_type: ClassVar[str] = ""  # of its config.json; "": it has none
    sharded: ClassVar[bool] = False  # `write` can split the weights into several files
    gated: ClassVar[bool] = False  # models have gates, whose entropies belong to one vocabulary size

    @staticmethod
    def recognises(tree: Mapping[str, Any]) -> bool:
        """Whether a config.json is of this layout."""
        raise NotImplementedError

    @staticmethod
    def config(source: Source, name: str) -> Config:
        """Our config of a source, or why there is none."""
        raise NotImplementedError

    @staticmethod
    def weights(source: Source, held: Tensors, config: Config) -> dict[str, Tensor]:
        """Our tensors by name, all of them; `held` is left with what was not used."""
        raise NotImplementedError

    @staticmethod
    def reference(source: Source, tokens: Tensor) -> tuple[Tensor, str]:
        """Logits [B, T, V] of the published folder, not by our model, and by what."""
        raise NotImplementedError

    @classmethod
    def outputs(cls, source: Source, tokens: Tensor, decided: Tensor | None = None) -> Outputs:
        """`reference`, with the gates of a layout that has them.

        decided [K, B, T]: decisions of the model it is compared with, to be taken over where an entropy is
        within rounding of a threshold.
        """
        return Outputs(*cls.reference(source, tokens))

    @staticmethod
    def check_files(source: Source) -> None:
        """Refuse files that are not those that were published, before a tensor is read."""

    @staticmethod
    def notes(source: Source) -> list[str]:
        """What a user should know of this folder, a line each."""
        return []

    @staticmethod
    def no_tokenizer(source: Source) -> str:
        """What to note where the folder holds no tokenizer.json and none was given."""
        return NO_TOKENIZER

    @staticmethod
    def keep(source: Source) -> dict[str, str]:
        """Text files by name, written beside our model: what the way back needs and our config lacks."""
        return {}

    unused: ClassVar[tuple[str, ...]] = ()  # patterns of tensors that hold nothing learned

    @staticmethod
    def back(config: Config, weights: dict[str, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """config.json and tensors of one of our models in this layout, or why it has none."""
        raise AmorError("this layout is read, not written")

    @classmethod
    def write(cls, config: Config, weights: dict[str, Tensor], folder: Path, origin: Path, shard: int | None = None) -> list[str]:
        """Write one of our models in this layout; what there is to note. origin: the folder it lies in."""
        from safetensors.torch import save_file

        tree, tensors = cls.back(config, weights)
        (folder / "config.json").write_text(json.dumps(tree, indent=2) + "\n")
        held = {name: t.contiguous() for name, t in tensors.items()}
        save_file(held, folder / "model.safetensors", metadata={"format": "pt"})
        return []


class Settings:
    """A config.json read key by key: a missing key has its library's default, what we cannot do is refused."""

    def __init__(self, tree: Mapping[str, Any], where: str):
        self.tree, self.where = tree, where

    def __getitem__(self, key: str) -> Any:
        return self.tree.get(key)

    def count(self, key: str, default: int | None = None) -> int:
        """A whole number above 0."""
        value = self.tree.get(key)
        value = default if value is None else value
        if type(value) is not int or value < 1:
            raise AmorError(f"{self.where}: {key} is {value!r}; a whole number above 0 is needed")
        return value

    def real(self, key: str, default: float) -> float:
        value = self.tree.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise AmorError(f"{self.where}: {key} is {value!r}; a number is needed")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.tree.get(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise AmorError(f"{self.where}: {key} is {value!r}; true or false is needed")
        return value

    def only(self, key: str, allowed: tuple[Any, ...], why: str) -> None:
        """A key that is missing, null, or one of these; else it is refused, and why."""
        value = self.tree.get(key)
        if value is not None and value not in allowed:
            raise AmorError(f"{self.where}: {key} is {str(value)[:80]}; {why}")


def head_of(held: Tensors, config: Config, embed: Tensor, rows: int, name: str = "lm_head.weight") -> dict[str, Tensor]:
    """The head's own weights; of a tied one nothing, and a copy of the embedding that was stored must be one."""
    if config.tied:
        if name in held and not torch.equal(held.take(name, rows, config.width), embed):
            raise AmorError(f"{held.where}: the head is tied to the embedding by its config.json, but {name} is another matrix")
        return {}
    return {"head.weight": held.take(name, rows, config.width)}


def plain_backbone(config: Config, kind: str, layout: str) -> None:
    """Refuse a model that is not one mixer everywhere and nothing behind."""
    others = sorted(set(config.pattern) - {kind})
    if others:
        raise AmorError(f"{layout} has layers of {kind} alone; this model has {', '.join(others)} too: use --to hf")
    if len({config.eps(norm) for norm in ("mixer_norm", "mixer", "mlp_norm", "norm_f")}) > 1:
        raise AmorError(f"{layout} has one epsilon for all norms, this model has several (norm_eps_of): use --to hf")
    if config.blocks.count:
        raise AmorError(f"{layout} has no gated blocks, this model has {config.blocks.count}: use --to hf")
