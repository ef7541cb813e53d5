"""The folders of the paper authors' released code: both backbones, both residual modes, K blocks.

`model_kwargs` of config.json are the arguments of their model class. Tensors are renamed (and the
three convolutions of a Gated DeltaNet layer joined); what their code fixes (epsilons, floor of
alpha, threshold, RoPE base) becomes keys of our config.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from amor.config import Config
from amor.convert.authors_back import as_released, model_kwargs, renamed, with_defaults
from amor.convert.authors_facts import (
    ALPHA_FLOOR,
    ATTENTION_MODES,
    BACKBONES,
    BLOCK,
    DEFAULTS,
    EPS,
    FIRST,
    FIT_META,
    FIXED_OFFSET,
    GATE_OPTIONS,
    KAPPA,
    KEPT,
    LAYER,
    NEEDED,
    ROPE_THETA,
    gdn_heads,
)
from amor.convert.authors_files import check_manifest, write_weights
from amor.convert.authors_router import (
    read_router,
    router_of,
    router_options,
    router_tensors,
    write_router,
)
from amor.convert.authors_written import authors_forward
from amor.convert.base import Layout, Outputs, Settings, head_of
from amor.convert.mamba2 import mixer as mamba2_mixer
from amor.convert.source import CONFIG, Source, Tensors
from amor.errors import AmorError, nearest
from amor.gates.base import SKETCH

BY = "their model written out in float64"


class Authors(Layout):
    kind = "authors"
    title = "the authors' AMOR"
    gated = sharded = True

    @staticmethod
    def recognises(tree: Mapping[str, Any]) -> bool:
        return "model_kwargs" in tree and "model_type" not in tree

    @staticmethod
    def config(source: Source, name: str) -> Config:
        s = settings(source)
        width, backbone, heads = s.count("d_model"), s["backbone"], s.count("n_heads")
        if width % heads:
            raise AmorError(f"{s.where}: d_model {width} is not a whole number of n_heads {heads}")
        router = read_router(source.folder)
        blocks = {
            "count": s.count("n_amor_blocks"),
            "first": FIRST[s["residual_mode"]],
            "head_size": width // heads,
            "rope_theta": ROPE_THETA,
            "gate": "router" if router else "entropy",
            "gate_options": router_options(router) if router else GATE_OPTIONS,
            "alpha_floor": ALPHA_FLOOR,
        }
        keys = {
            "name": name,
            "vocab": s.count("vocab_size"),
            "width": width,
            "d_ff": s.count("d_ff"),
            "pattern": f"{BACKBONES[backbone]} x{s.count('n_layer')}",
            "context": s.count("max_seq_len"),  # nominal: nothing of ours stops a longer text
            "conv_init": "uniform",
            "tied": True,
            "mixers": {BACKBONES[backbone]: mixer_options(s)},
            "blocks": blocks,
        }
        return Config.from_dict(keys | EPS[backbone], s.where)

    @staticmethod
    def check_files(source: Source) -> None:
        check_manifest(source.folder)
        read_router(source.folder)

    @staticmethod
    def notes(source: Source) -> list[str]:
        lines = []
        if source.tree["model_kwargs"].get("offset_mode") == "fixed":
            lines.append('offset_mode "fixed" is kept as a std of 0.15; training would replace it')
        router = read_router(source.folder)
        if router is not None:
            size = f"({len(router.blocks)} blocks, hidden size {router.hidden_dim})"
            lines.append(f"its fitted router {size} decides; amor fit --detach leaves it out")
        return lines

    @staticmethod
    def no_tokenizer(source: Source) -> str:
        hub = source.tree.get("tokenizer")
        known = "no tokenizer is named"
        if isinstance(hub, str):
            known = f"its tokenizer is {hub[:200]!r} of the hub"
        return f"{known}, no file of it is in the folder: text needs one, give --tokenizer FILE"

    @staticmethod
    def keep(source: Source) -> dict[str, str]:
        router = read_router(source.folder)
        meta = [one.fit_meta.tolist() for one in router.blocks] if router else None
        tree = source.tree | ({FIT_META: meta} if meta else {})
        return {KEPT: json.dumps(tree, indent=2) + "\n"}

    @staticmethod
    def weights(source: Source, held: Tensors, config: Config) -> dict[str, Tensor]:
        width, d_ff, backbone = config.width, config.d_ff, settings(source)["backbone"]
        embed = held.take("embed.weight", config.vocab, width)
        found = {"embed.weight": embed}
        for name in ("norm_f.weight", "final_norm.weight"):
            found[name] = held.take(name, width)
        for i in range(len(config.pattern)):
            ours = f"backbone.layers.{i}"
            names = {name: theirs.format(i=i) for name, theirs in LAYER[backbone].items()}
            for norm in ("mixer_norm.", "mlp_norm."):
                found[f"{ours}.{norm}weight"] = held.take(f"{names[norm]}weight", width)
            for name in ("gate_proj", "up_proj", "down_proj"):
                shape = (width, d_ff) if name == "down_proj" else (d_ff, width)
                mlp = held.take(f"{names['mlp.']}{name}.weight", *shape)
                found[f"{ours}.mlp.{name}.weight"] = mlp
            take = gdn_mixer if backbone == "gdn" else mamba2_mixer
            found |= take(held, config, names["mixer."].removesuffix("."), f"{ours}.mixer")
        router = read_router(source.folder)
        for k in range(config.blocks.count):
            found |= block(held, config, k, settings(source)["offset_mode"] == "fixed")
            if router is not None:
                found |= router_tensors(router.blocks[k], config, found, f"blocks.{k}.gate")
        return found | head_of(held, config, embed, config.vocab)

    @staticmethod
    def reference(source: Source, tokens: Tensor) -> tuple[Tensor, str]:
        return Authors.outputs(source, tokens).logits, BY

    @staticmethod
    def outputs(source: Source, tokens: Tensor, decided: Tensor | None = None) -> Outputs:
        router = read_router(source.folder)
        predict = [one.double().predict for one in router.blocks] if router else None
        tensors = source.tensors().held
        out = authors_forward(settings(source).tree, tensors, tokens, decided, predict)
        return Outputs(out.logits, BY, out.entropy, out.fire, out.ties)

    @staticmethod
    def back(config: Config, weights: dict[str, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
        kwargs = model_kwargs(config)
        tensors = dict(renamed(weights, config, kwargs["backbone"]))
        return {"model_kwargs": with_defaults(kwargs)}, tensors

    @staticmethod
    def write(
        config: Config,
        weights: dict[str, Tensor],
        folder: Path,
        origin: Path,
        shard: int | None = None,
    ) -> list[str]:
        _, tensors = Authors.back(config, weights)
        tree = as_released(model_kwargs(config), tensors, origin)
        released = {key: value for key, value in tree.items() if key != FIT_META}
        (folder / CONFIG).write_text(json.dumps(released, indent=2) + "\n")
        write_weights(tensors, folder, shard)
        notes = []
        if "tokenizer" not in tree:
            notes.append(f'{CONFIG} names no tokenizer; their loader wants a hub name, "tokenizer"')
        if config.blocks.gate == "router":
            write_router(folder, router_of(weights, config, tree.pop(FIT_META, None)))
            notes.append("its router is written along, bound to the new weight files")
        return notes


def settings(source: Source) -> Settings:
    """`model_kwargs` with their defaults; an unknown key may change the model: refused."""
    where, given = f"{source.folder / CONFIG}: model_kwargs", source.tree["model_kwargs"]
    if not isinstance(given, dict):
        raise AmorError(f"{where}: expected an object of keys, not {type(given).__name__}")
    given = {key: value for key, value in given.items() if value is not None}
    for key in given:
        if key not in (*NEEDED, *DEFAULTS):
            hint = nearest(key[:80], (*NEEDED, *DEFAULTS))
            raise AmorError(f"{where}: no key {key[:80]!r} is known; {hint}")
    s = Settings(DEFAULTS | given, where)
    words = {"backbone": BACKBONES, "residual_mode": FIRST, "attention_mode": ATTENTION_MODES}
    for key, allowed in words.items():
        if not isinstance(s[key], str) or s[key] not in allowed:
            known = ", ".join(allowed)
            raise AmorError(f"{where}: {key} is {str(s[key])[:80]!r}; known are {known}")
    s.only("offset_mode", ("fixed",), 'known are "fixed", and none: median + 0.2 std')
    return s


def mixer_options(s: Settings) -> dict[str, int]:
    head_size, conv, width = s.count("head_dim"), s.count("d_conv"), s.count("d_model")
    if s["backbone"] == "mamba2":
        states = {"state_size": s.count("d_state"), "groups": s.count("n_groups")}
        return {"head_size": head_size, "conv": conv, "expand": s.count("expand")} | states
    expand, heads = s.real("expand_v", 2.0), gdn_heads(width, head_size)
    if expand != int(expand):
        raise AmorError(f"{s.where}: expand_v is {expand:g}; our values are a whole number of keys")
    if not heads:
        raise AmorError(f"{s.where}: head_dim {head_size} exceeds 3/4 of d_model {width}")
    return {"head_size": head_size, "conv": conv, "heads": heads, "expand_v": int(expand)}


def gdn_mixer(held: Tensors, config: Config, theirs: str, ours: str) -> dict[str, Tensor]:
    """One Gated DeltaNet layer of fla; its three convolutions are one here."""
    width, o = config.width, config.mixer_options("gated_deltanet")
    keys, heads = o.heads * o.head_size, o.heads
    values = keys * o.expand_v
    sizes = {"q": keys, "k": keys, "v": values, "g": values, "a": heads, "b": heads}
    found = {}
    for n, size in sizes.items():
        found[f"{ours}.{n}_proj.weight"] = held.take(f"{theirs}.{n}_proj.weight", size, width)
    found[f"{ours}.o_proj.weight"] = held.take(f"{theirs}.o_proj.weight", width, values)
    taps = [held.take(f"{theirs}.{n}_conv1d.weight", sizes[n], 1, o.conv) for n in "qkv"]
    found[f"{ours}.conv1d.weight"] = torch.cat(taps)
    for name, size in {"A_log": heads, "dt_bias": heads, "o_norm.weight": values // heads}.items():
        found[f"{ours}.{name}"] = held.take(f"{theirs}.{name}", size)
    return found


def block(held: Tensors, config: Config, k: int, fixed: bool) -> dict[str, Tensor]:
    """One gated block. Its gate has no quantiles, so it cannot aim at a firing rate yet."""
    width, ours, theirs = config.width, f"blocks.{k}", f"amor_blocks.{k}"
    found: dict[str, Tensor] = {}
    for name, other in BLOCK.items():
        shape = () if name.startswith("gate.") else (width,) if name == "alpha" else (width, width)
        found[f"{ours}.{name}"] = held.take(f"{theirs}.{other}", *shape)
    if fixed:
        found[f"{ours}.gate.sigma"] = torch.tensor(FIXED_OFFSET / KAPPA)
    if k:
        found[f"{ours}.norm.weight"] = held.take(f"amor_pre_norms.{k}.weight", width)
    found[f"{ours}.gate.quantiles"] = torch.zeros(SKETCH)
    found[f"{ours}.gate.updates"] = torch.tensor(1)
    return found
