"""One of our models in the authors' layout: `model_kwargs` and tensors, or why it has none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from amor import typed
from amor.config import NORMS, Config
from amor.convert.authors_facts import (
    ALPHA_FLOOR,
    BACKBONES,
    BLOCK,
    DEFAULTS,
    EPS,
    FIRST,
    FIXED_OFFSET,
    KAPPA,
    KEPT,
    LAYER,
    ROPE_THETA,
    gdn_heads,
)
from amor.convert.source import CONFIG
from amor.errors import AmorError
from amor.gates.router import RouterOptions

Named = tuple[str, Tensor]  # a tensor by its name
# of a gate: their layout has a median and a std, and routers in a file of their own
STATISTICS = ("gate.mu", "gate.sigma")


def model_kwargs(config: Config) -> dict[str, Any]:
    """Arguments of their model class that make this model; refused where there are none."""
    backbone = backbone_of(config)
    for problem in differences(config, backbone):
        raise AmorError(f"the authors' layout cannot hold this model: {problem}")
    o = config.mixer_options(BACKBONES[backbone])
    first = {ours: theirs for theirs, ours in FIRST.items()}
    kwargs = {
        "backbone": backbone,
        "n_amor_blocks": config.blocks.count,
        "residual_mode": first[config.blocks.first],
        "d_model": config.width,
        "n_layer": len(config.pattern),
        "d_ff": config.d_ff,
        "n_heads": config.width // config.blocks.head_size,
        "head_dim": o.head_size,
        "d_conv": o.conv,
        "vocab_size": config.vocab,
        "max_seq_len": config.context,
    }
    if backbone == "mamba2":
        kwargs |= {"d_state": o.state_size, "expand": o.expand, "n_groups": o.groups}
    else:
        kwargs |= {"expand_v": float(o.expand_v)}
    return kwargs


def with_defaults(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in DEFAULTS.items() if value is not None} | kwargs


def backbone_of(config: Config) -> str:
    for theirs, kind in BACKBONES.items():
        if set(config.pattern) == {kind}:
            return theirs
    kinds = ", ".join(sorted(set(config.pattern)))
    raise AmorError(f"the authors' layout has mamba2 or gated_deltanet layers alone, not {kinds}")


def differences(config: Config, backbone: str) -> Iterator[str]:
    """What this model computes and theirs cannot, one line each."""
    blocks = config.blocks
    if not blocks.count:
        yield "it has no gated blocks, theirs has at least one"
    if blocks.gate == "router":
        yield from router_differences(config.gate_options())
    elif blocks.gate != "entropy":
        yield f"its gate is {blocks.gate!r}, theirs 'entropy'"
    elif config.gate_options().kappa != KAPPA:
        yield f"its gate has kappa {config.gate_options().kappa:g}, theirs {KAPPA:g}"
    if blocks.alpha_floor != ALPHA_FLOOR:
        yield f"blocks.alpha_floor is {blocks.alpha_floor:g}, theirs {ALPHA_FLOOR}"
    if blocks.mlp:
        yield "its blocks have MLPs (blocks.mlp), theirs none"
    fixed_keys = {"final": "norm", "probe": "block", "decide": "each", "rope_theta": ROPE_THETA}
    for key, value in fixed_keys.items():
        if getattr(blocks, key) != value:
            yield f"blocks.{key} is {getattr(blocks, key)!r}, theirs {value!r}"
    if not config.tied:
        yield "its head has weights of its own, theirs is tied to the embedding"
    if not config.d_ff:
        yield "its layers have no MLPs (d_ff = 0), theirs have"
    for norm in NORMS:
        theirs = EPS[backbone]["norm_eps_of"].get(norm, EPS[backbone]["norm_eps"])
        if config.eps(norm) != theirs:
            yield f"the epsilon of {norm} is {config.eps(norm):g}, theirs {theirs:g}"
    if backbone == "gdn":
        o = config.mixer_options("gated_deltanet")
        heads, wanted = o.count(config.width), gdn_heads(config.width, o.head_size)
        if heads != wanted:
            yield f"gated_deltanet has {heads} heads, theirs three quarters of the width: {wanted}"


def router_differences(options: RouterOptions) -> Iterator[str]:
    """What a router of ours does and a fitted router of theirs does not."""
    if options.target != "entropy":
        yield f"its router predicts {options.target}, theirs entropy"
    if options.rate is not None:
        yield f"its router fires on {options.rate:g} of the tokens, theirs at the trained threshold"
    if options.kappa != KAPPA:
        yield f"its router has kappa {options.kappa:g}, theirs {KAPPA:g}"
    if not options.hidden:
        yield "its router has no hidden layer, theirs has"


def renamed(weights: dict[str, Tensor], config: Config, backbone: str) -> Iterator[Named]:
    """Every tensor by their name."""
    for name, tensor in weights.items():
        room, _, rest = name.partition(".")
        if room == "backbone":
            _, i, inner = rest.split(".", 2)
            yield from layer_tensor(inner, int(i), tensor, config, backbone)
        elif room == "blocks":
            k, _, inner = rest.partition(".")
            if inner == "gate.updates" and not int(tensor):
                raise AmorError(f"the gate of block {k} has met no data: no threshold to write")
            if inner == "norm.weight":
                yield f"amor_pre_norms.{k}.weight", tensor
            elif inner in STATISTICS or not inner.startswith("gate."):
                yield f"amor_blocks.{k}.{BLOCK[inner]}", tensor
        else:
            yield name, tensor


def layer_tensor(name: str, i: int, tensor: Tensor, config: Config, backbone: str) -> Iterator[Named]:
    ours = next(part for part in LAYER[backbone] if name.startswith(part))
    theirs = LAYER[backbone][ours].format(i=i) + name.removeprefix(ours)
    if backbone == "gdn" and name == "mixer.conv1d.weight":
        o = config.mixer_options("gated_deltanet")
        keys = o.count(config.width) * o.head_size
        for n, part in zip("qkv", tensor.split([keys, keys, keys * o.expand_v]), strict=True):
            yield theirs.replace(".conv1d.", f".{n}_conv1d."), part
    else:
        yield theirs, tensor


def as_released(kwargs: dict[str, Any], tensors: dict[str, Tensor], origin: Path) -> dict[str, Any]:
    """config.json of a model that came from their layout, as it was where the model is still the same.

    Our config has no place for the tokenizer's hub name, `attention_mode` and which keys were left
    at their defaults.
    """
    kept = released_config(origin)
    if kept is None:
        return {"model_kwargs": with_defaults(kwargs)}
    before = dict(kept["model_kwargs"])
    if not fixed(tensors):
        before.pop("offset_mode", None)
    full = DEFAULTS | {key: value for key, value in before.items() if value is not None}
    if any(full.get(key) != value for key, value in kwargs.items()):
        before = with_defaults(kwargs)
    return kept | {"model_kwargs": before}


def released_config(folder: Path) -> dict[str, Any] | None:
    """The config.json of a released folder, or the one that a converted folder kept."""
    for path in (folder / CONFIG, folder / KEPT):
        if path.is_file():
            tree = typed.json_tree(typed.read_text(path), str(path))
            if isinstance(tree, dict) and isinstance(tree.get("model_kwargs"), dict):
                return tree
            if path.name == KEPT:
                raise AmorError(f"{path}: expected the config.json of a released folder; remove it")
    return None


def fixed(tensors: dict[str, Tensor]) -> bool:
    """Whether all gates still have the std that stands for a fixed offset."""
    stds = [t for name, t in tensors.items() if name.endswith(".gate.running_std")]
    return all(torch.equal(t.float(), torch.tensor(FIXED_OFFSET / KAPPA)) for t in stds)
