"""Loads the tensors of a model folder of ours into the layers of vLLM.

A missing, extra or misshapen tensor is an error.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from amor.config import Config
from amor.errors import AmorError
from amor.models.amor import Amor

# our part of a name -> vLLM's, and which part of the tensor it is
STACKED: dict[str, tuple[str, str | int]] = {
    "q_proj": ("qkv_proj", "q"),
    "k_proj": ("qkv_proj", "k"),
    "v_proj": ("qkv_proj", "v"),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
}
UNFIT = "the weights do not fit their config"
RENAMED = {"A_log": "A", "gate": "decider.gate"}


def load(model: nn.Module, config: Config, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
    """Fill vLLM's tensors; returns the names of those that were filled."""
    with torch.device("meta"):
        wanted = {name: tensor.shape for name, tensor in Amor(config).state_dict().items()}
    targets = dict(model.named_parameters()) | dict(model.named_buffers())
    filled = set()
    for name, tensor in weights:
        if name not in wanted:
            raise AmorError(f"{UNFIT}: no tensor {name[:200]!r}, or it comes twice")
        if tensor.shape != wanted.pop(name):
            raise AmorError(f"{UNFIT}: {name} has shape {list(tensor.shape)}")
        place, part = placed(name)
        if place not in targets:  # a mixer of our own, inside the layer that keeps its states
            place = name.removeprefix("backbone.").replace(".mixer.", ".mixer.inner.", 1)
            part = None
        target = targets[place]
        loader = getattr(target, "weight_loader", default_weight_loader)
        loader(target, tensor) if part is None else loader(target, tensor, part)
        filled.add(place)
    for name in sorted(wanted):
        raise AmorError(f"{UNFIT}: tensor {name!r} is missing")
    return filled


def placed(name: str) -> tuple[str, str | int | None]:
    """The name of vLLM's tensor for one of ours, and the part of it that ours fills."""
    part: str | int | None = None
    words = []
    for word in name.removeprefix("backbone.").split("."):
        if word in STACKED:
            word, part = STACKED[word]
        words.append(RENAMED.get(word, word))
    return ".".join(words), part
