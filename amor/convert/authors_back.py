"""The config.json of one of our models in the authors' layout, or the reason why it has none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from amor import typed
from amor.config import NORMS, Config
from amor.convert import authors_facts as facts
from amor.convert.source import CONFIG
from amor.errors import AmorError
from amor.gates.router import RouterOptions


def model_kwargs(config: Config) -> dict[str, Any]:
    """Arguments of their model class that make this model; refused where there are none."""
    backbone = backbone_of(config)
    for problem in differences(config, backbone):
        raise AmorError(f"the authors' layout cannot hold this model: {problem}")
    o = config.mixer_options(facts.BACKBONES[backbone])
    first = {ours: theirs for theirs, ours in facts.FIRST.items()}
    kwargs = {
        "backbone": backbone,
        "n_amor_blocks": config.blocks.count,
        "residual_mode": first[config.blocks.first],
        "n_layer": len(config.pattern),
        "n_heads": config.width // config.blocks.head_size,
        **{theirs: getattr(config, ours) for ours, theirs in facts.SIZES.items()},
        **{theirs: getattr(o, ours) for ours, theirs in facts.OPTIONS[backbone].items()},
    }
    if backbone == "gdn":
        kwargs["expand_v"] = float(o.expand_v)
    return kwargs


def with_defaults(kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments, those at their defaults too."""
    return {key: value for key, value in facts.DEFAULTS.items() if value is not None} | kwargs


def backbone_of(config: Config) -> str:
    """Their name of our model's backbone."""
    for theirs, kind in facts.BACKBONES.items():
        if set(config.pattern) == {kind}:
            return theirs
    kinds = ", ".join(sorted(set(config.pattern)))
    raise AmorError(f"the authors' layout has mamba2 or gated_deltanet layers alone, not {kinds}")


def differences(config: Config, backbone: str) -> Iterator[str]:
    """What this model computes and theirs cannot, one line for each difference."""
    blocks = config.blocks
    if not blocks.count:
        yield "it has no gated blocks, theirs has at least one"
    if blocks.gate == "router":
        yield from router_differences(config.gate_options())
    elif blocks.gate != "entropy":
        yield f"its gate is {blocks.gate!r}, theirs 'entropy'"
    elif config.gate_options().kappa != facts.KAPPA:
        yield f"its gate has kappa {config.gate_options().kappa:g}, theirs {facts.KAPPA:g}"
    if blocks.alpha_floor != facts.ALPHA_FLOOR:
        yield f"blocks.alpha_floor is {blocks.alpha_floor:g}, theirs {facts.ALPHA_FLOOR}"
    if blocks.mlp:
        yield "its blocks have MLPs (blocks.mlp), theirs none"
    fixed_keys = {
        "final": "norm",
        "probe": "block",
        "decide": "each",
        "rope_theta": facts.ROPE_THETA,
    }
    for key, value in fixed_keys.items():
        if getattr(blocks, key) != value:
            yield f"blocks.{key} is {getattr(blocks, key)!r}, theirs {value!r}"
    if not config.tied:
        yield "its head has weights of its own, theirs is tied to the embedding"
    if not config.d_ff:
        yield "its layers have no MLPs (d_ff = 0), theirs have"
    for norm in NORMS:
        theirs = facts.EPS[backbone]["norm_eps_of"].get(norm, facts.EPS[backbone]["norm_eps"])
        if config.eps(norm) != theirs:
            yield f"the epsilon of {norm} is {config.eps(norm):g}, theirs {theirs:g}"
    if backbone == "gdn":
        o = config.mixer_options("gated_deltanet")
        heads, wanted = o.count(config.width), facts.gdn_heads(config.width, o.head_size)
        if heads != wanted:
            yield f"gated_deltanet has {heads} heads, theirs three quarters of the width: {wanted}"


def router_differences(options: RouterOptions) -> Iterator[str]:
    """What a router of ours does and a fitted router of theirs does not."""
    if options.target != "entropy":
        yield f"its router predicts {options.target}, theirs entropy"
    if options.rate is not None:
        yield f"its router fires on {options.rate:g} of the tokens, theirs at the trained threshold"
    if options.kappa != facts.KAPPA:
        yield f"its router has kappa {options.kappa:g}, theirs {facts.KAPPA:g}"
    if not options.hidden:
        yield "its router has no hidden layer, theirs has"


def as_released(kwargs: dict[str, Any], tensors: dict[str, Tensor], origin: Path) -> dict[str, Any]:
    """config.json of a model that came from their layout, as it was if the model is still the same.

    Our config has no place for the tokenizer's hub name, `attention_mode` and which keys were left
    at their defaults.
    """
    kept = released_config(origin)
    if kept is None:
        return {"model_kwargs": with_defaults(kwargs)}
    before = dict(kept["model_kwargs"])
    if not fixed(tensors):
        before.pop("offset_mode", None)
    full = facts.DEFAULTS | {key: value for key, value in before.items() if value is not None}
    if any(full.get(key) != value for key, value in kwargs.items()):
        before = with_defaults(kwargs)
    return kept | {"model_kwargs": before}


def released_config(folder: Path) -> dict[str, Any] | None:
    """The config.json of a released folder, or the one that a converted folder kept."""
    for path in (folder / CONFIG, folder / facts.KEPT):
        if path.is_file():
            tree = typed.json_tree(typed.read_text(path), str(path))
            if isinstance(tree, dict) and isinstance(tree.get("model_kwargs"), dict):
                return tree
            if path.name == facts.KEPT:
                raise AmorError(f"{path}: expected the config.json of a released folder; remove it")
    return None


def fixed(tensors: dict[str, Tensor]) -> bool:
    """Whether all gates still have the std that stands for a fixed offset."""
    stds = [t for name, t in tensors.items() if name.endswith(".gate.running_std")]
    return all(torch.equal(t.float(), torch.tensor(facts.FIXED_STD)) for t in stds)
