"""The folders of the paper authors' released code: both backbones, both residual modes, K blocks.

`model_kwargs` of config.json are the arguments of their model class. Tensors are renamed (and the
three convolutions of a Gated DeltaNet layer joined); what their code fixes (epsilons, floor of
alpha, threshold, RoPE base) becomes keys of our config.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from amor.config import Config
from amor.convert import authors_facts as facts
from amor.convert.authors_back import as_released, backbone_of, model_kwargs, with_defaults
from amor.convert.authors_files import check_manifest, write_weights
from amor.convert.authors_router import (
    RouterBlock,
    read_router,
    router_blocks,
    router_options,
    router_tensors,
    write_router,
)
from amor.convert.authors_written import authors_forward
from amor.convert.base import FolderLayout, Outputs, Written
from amor.convert.gated_deltanet_fla import join_convolutions, split_convolutions, whole_expand_v
from amor.convert.mamba2_hf import fill_conv_bias
from amor.convert.settings import Settings
from amor.convert.source import CONFIG, SourceTensors
from amor.errors import AmorError, nearest
from amor.gates.base import SKETCH

# their layout has a median and a std, and routers in a file of their own
WRITTEN_STATISTICS = ("mu", "sigma")


class Authors(FolderLayout):
    """A folder of the paper authors' released code."""

    kind = "authors"
    title = "the authors' AMOR"
    gated = sharded = True

    @classmethod
    def recognises(cls, tree: Mapping[str, Any]) -> bool:
        return "model_kwargs" in tree and "model_type" not in tree

    @cached_property
    def settings(self) -> Settings:
        """`model_kwargs` with their defaults; an unknown key may change the model: refused."""
        where = f"{self.source.folder / CONFIG}: model_kwargs"
        kwargs = self.source.tree["model_kwargs"]
        if not isinstance(kwargs, dict):
            raise AmorError(f"{where}: expected an object of keys, not {type(kwargs).__name__}")
        kwargs = {key: value for key, value in kwargs.items() if value is not None}
        known = (*facts.NEEDED, *facts.DEFAULTS)
        for key in (key for key in kwargs if key not in known):
            raise AmorError(f"{where}: no key {key[:80]!r} is known; {nearest(key[:80], known)}")
        s = Settings(facts.DEFAULTS | kwargs, where)
        choices = {
            "backbone": facts.BACKBONES,
            "residual_mode": facts.FIRST,
            "attention_mode": facts.ATTENTION_MODES,
        }
        for key, allowed in choices.items():
            if not isinstance(s[key], str) or s[key] not in allowed:
                words = f"{str(s[key])[:80]!r}; known are {', '.join(allowed)}"
                raise AmorError(f"{where}: {key} is {words}")
        s.only("offset_mode", ("fixed",), 'known are "fixed", and none: median + 0.2 std')
        return s

    @cached_property
    def router(self) -> tuple[RouterBlock, ...] | None:
        """The fitted router of the folder, where it has one."""
        return read_router(self.source.folder)

    def config(self, name: str) -> Config:
        s, router = self.settings, self.router
        width, heads, mixer = s.count("d_model"), s.count("n_heads"), facts.BACKBONES[s["backbone"]]
        if width % heads:
            raise AmorError(f"{s.where}: d_model {width} is not a whole number of n_heads {heads}")
        blocks = {
            "count": s.count("n_amor_blocks"),
            "first": facts.FIRST[s["residual_mode"]],
            "head_size": width // heads,
            "rope_theta": facts.ROPE_THETA,
            "gate": "router" if router else "entropy",
            "gate_options": router_options(router) if router else facts.GATE_OPTIONS,
            "alpha_floor": facts.ALPHA_FLOOR,
        }
        keys = {ours: s.count(theirs) for ours, theirs in facts.SIZES.items()} | {
            "name": name,
            "pattern": f"{mixer} x{s.count('n_layer')}",
            "conv_init": "uniform",
            "tied": True,
            "mixers": {mixer: mixer_options(s)},
            "blocks": blocks,
        }
        return Config.from_dict(keys | facts.EPS[s["backbone"]], s.where)

    def check_files(self) -> None:
        check_manifest(self.source.folder)

    def notes(self) -> list[str]:
        lines = []
        if self.settings["offset_mode"] == "fixed":
            lines.append('offset_mode "fixed" is kept as a std of 0.15; training would replace it')
        if self.router is not None:
            size = f"({len(self.router)} blocks, hidden size {len(self.router[0]['fc1.bias'])})"
            lines.append(f"its fitted router {size} decides; amor fit --detach leaves it out")
        return lines

    def no_tokenizer(self) -> str:
        hub = self.source.tree.get("tokenizer")
        named = f"its tokenizer is {hub[:200]!r} of the hub" if isinstance(hub, str) else ""
        no_file = "no file of it is in the folder: text needs one, give --tokenizer FILE"
        return f"{named or 'no tokenizer is named'}, {no_file}"

    def keep(self) -> dict[str, str]:
        fit_meta = [block["fit_meta"].tolist() for block in self.router or ()]
        meta = {facts.FIT_META: fit_meta} if fit_meta else {}
        return {facts.KEPT: json.dumps(self.source.tree | meta, indent=2) + "\n"}

    @classmethod
    def their_name(cls, name: str, config: Config) -> str:
        for ours, theirs in (facts.LAYER_NAMES[backbone_of(config)] | facts.BLOCK_NAMES).items():
            name = re.sub(ours, theirs, name)
        return name

    def adapt(self, tensors: SourceTensors, config: Config) -> None:
        if backbone_of(config) == "gdn":
            join_convolutions(tensors, config, "layers.{i}.gdn")
        else:
            fill_conv_bias(tensors)

    def weights(self, tensors: SourceTensors, config: Config) -> dict[str, Tensor]:
        weights = super().weights(tensors, config)
        fixed = self.settings["offset_mode"] == "fixed"
        for k in range(config.blocks.count):
            gate = gate_statistics(tensors, k, fixed)
            if self.router is not None:
                gate = router_tensors(self.router[k], config, gate)
            weights |= {f"blocks.{k}.gate.{name}": t for name, t in gate.items()}
        return weights

    def outputs(self, tokens: Tensor, decided: Tensor | None = None) -> Outputs:
        tensors = self.source.tensors().remaining
        return authors_forward(self.settings.tree, tensors, tokens, decided, self.router)

    @classmethod
    def back(cls, config: Config, weights: dict[str, Tensor]) -> Written:
        kwargs, tensors = model_kwargs(config), {}
        for name, tensor in weights.items():
            _, is_gate, statistic = name.partition(".gate.")
            if statistic == "updates" and not int(tensor):
                k = name.split(".")[1]
                raise AmorError(f"the gate of block {k} has met no data: no threshold to write")
            if not is_gate or statistic in WRITTEN_STATISTICS:
                tensors[cls.their_name(name, config)] = tensor
        if kwargs["backbone"] == "gdn":
            tensors = split_convolutions(tensors, config)
        return {"model_kwargs": with_defaults(kwargs)}, tensors

    @classmethod
    def write(
        cls,
        config: Config,
        weights: dict[str, Tensor],
        folder: Path,
        origin: Path,
        shard: int | None = None,
    ) -> list[str]:
        _, tensors = cls.back(config, weights)
        tree = as_released(model_kwargs(config), tensors, origin)
        fit_meta = tree.pop(facts.FIT_META, None)
        (folder / CONFIG).write_text(json.dumps(tree, indent=2) + "\n")
        write_weights(tensors, folder, shard)
        notes = []
        if "tokenizer" not in tree:
            notes.append(f'{CONFIG} names no tokenizer; their loader wants a hub name, "tokenizer"')
        if config.blocks.gate == "router":
            write_router(folder, router_blocks(weights, config, fit_meta))
            notes.append("its router is written along, bound to the new weight files")
        return notes


def mixer_options(s: Settings) -> dict[str, int]:
    """Options of our mixer."""
    options = {ours: s.count(theirs) for ours, theirs in facts.OPTIONS[s["backbone"]].items()}
    if s["backbone"] == "gdn":
        width, head_size = s.count("d_model"), options["head_size"]
        options |= {"heads": facts.gdn_heads(width, head_size), "expand_v": whole_expand_v(s)}
        if not options["heads"]:
            raise AmorError(f"{s.where}: head_dim {head_size} exceeds 3/4 of d_model {width}")
    return options


def gate_statistics(tensors: SourceTensors, k: int, fixed: bool) -> dict[str, Tensor]:
    """Buffers of our entropy gate; without quantiles, so it cannot aim at a firing rate yet.

    fixed: whether the threshold is the median and a fixed offset.
    """
    std = tensors.take(f"amor_blocks.{k}.gate.running_std")
    return {
        "mu": tensors.take(f"amor_blocks.{k}.gate.running_threshold"),
        "sigma": torch.tensor(facts.FIXED_STD) if fixed else std,
        "quantiles": torch.zeros(SKETCH),
        "updates": torch.tensor(1),
    }
