"""A fitted router of the authors' folders: router_config.json and router.safetensors.

A router predicts each block's normalised entropy from the block's normed input; the prediction is
compared with the block's threshold, so that the head need not be read. It was fitted to one set
of weights and is refused beside any other.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from msgspec import Meta
from torch import Tensor

from amor import tensors as on_disk
from amor import typed
from amor.config import Config
from amor.convert.authors_facts import KAPPA
from amor.convert.authors_files import SHA256, sha256, weights_identity
from amor.convert.source import CONFIG, SourceFolder
from amor.convert.written import Weights, below
from amor.errors import AmorError
from amor.gates.router import NETWORK, Router

ROUTER_CONFIG, ROUTER = "router_config.json", "router.safetensors"
FORMAT = {"format_version": 1, "variant": "distill", "activation": "silu"}
RouterBlock = Weights  # the tensors of one block by the names in its file, see `shapes`


@dataclass(frozen=True)
class RouterModel:
    """Which model a router belongs to."""

    backbone: str
    residual_mode: str
    d_model: typed.Positive
    n_blocks: typed.Positive


@dataclass(frozen=True)
class RouterConfig:
    """router_config.json."""

    format_version: int
    variant: str
    hidden_dim: Annotated[int, Meta(ge=1, le=2**20)]
    activation: str
    model: RouterModel
    base_weight_sha256: SHA256
    router_sha256: SHA256


def read_router(folder: Path) -> tuple[RouterBlock, ...] | None:
    """The router of a released folder, None where it has none; one of other weights is refused."""
    there = [name for name in (ROUTER_CONFIG, ROUTER) if (folder / name).is_file()]
    if not there:
        return None
    path = folder / ROUTER_CONFIG
    if len(there) == 1:
        raise AmorError(f"{folder} holds {there[0]} alone; a router is two files")
    config = typed.read(RouterConfig, path)
    for key, value in FORMAT.items():
        if getattr(config, key) != value:
            raise AmorError(f"{path}: {key} is {getattr(config, key)!r}; read is {value!r}")
    model = router_model(folder)
    if config.model != model:
        raise AmorError(f"{path} is of another model: {config.model}, but {CONFIG} says {model}")
    if config.base_weight_sha256 != weights_identity(folder):
        raise AmorError(f"{path}: its router was fitted to other weights (base_weight_sha256)")
    if config.router_sha256 != sha256(folder / ROUTER):
        raise AmorError(f"{folder / ROUTER} is not the file of {ROUTER_CONFIG} (router_sha256)")
    return read_tensors(folder / ROUTER, config)


def router_model(folder: Path) -> RouterModel:
    """The model that config.json of a released folder describes."""
    source = SourceFolder.open(folder)
    kwargs = source.tree.get("model_kwargs")
    if not isinstance(kwargs, dict):
        path = folder / CONFIG
        raise AmorError(f"{path} has no model_kwargs, so a router cannot be matched with it")
    facts = {key: kwargs.get(key) for key in ("backbone", "residual_mode", "d_model")}
    facts["n_blocks"] = kwargs.get("n_amor_blocks")
    return typed.convert(RouterModel, facts, f"{folder / CONFIG}: model_kwargs")


def read_tensors(path: Path, config: RouterConfig) -> tuple[RouterBlock, ...]:
    """The networks of all blocks; refused is a file with any other tensor, shape or dtype."""
    width, hidden = config.model.d_model, config.hidden_dim
    wanted = {
        f"blocks.{k}.{name}": shape
        for k in range(config.model.n_blocks)
        for name, shape in shapes(width, hidden).items()
    }
    tensors = on_disk.read_files([path])
    for name in sorted(wanted.keys() - tensors.keys()):
        raise AmorError(f"{path}: tensor {name!r} is missing")
    for name in sorted(tensors.keys() - wanted.keys()):
        raise AmorError(f"{path}: there is no place for tensor {name[:200]!r} in this router")
    for name, shape in wanted.items():
        form = _form(tensors[name].dtype, tensors[name].shape)
        right = _form(torch.int64 if name.endswith(".fit_meta") else torch.float32, shape)
        if form != right:
            raise AmorError(f"{path}: {name} is {form}, not {right}")
    blocks = tuple(below(tensors, f"blocks.{k}") for k in range(config.model.n_blocks))
    for k, block in enumerate(blocks):
        fitted = (int(block["fit_meta"][0]), int(block["fit_meta"][2]))
        if fitted != (width, k):
            other = f"width {fitted[0]} and block {fitted[1]}"
            raise AmorError(f"{path}: blocks.{k}.fit_meta is of {other}, not {width} and {k}")
    return blocks


def _form(dtype: torch.dtype, shape: Sequence[int]) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"


def shapes(width: int, hidden: int) -> dict[str, tuple[int, ...]]:
    """Tensors of one block: fc2(silu(fc1 x)) + skip x, and width, 0, block and one more number."""
    return {
        "fc1.weight": (hidden, width),
        "fc1.bias": (hidden,),
        "fc2.weight": (1, hidden),
        "fc2.bias": (1,),
        "skip.weight": (1, width),
        "fit_meta": (4,),
    }


def router_options(router: Sequence[RouterBlock]) -> dict[str, Any]:
    """Options of our gate."""
    hidden = len(router[0]["fc1.bias"])
    return {"target": "entropy", "hidden": hidden, "kappa": KAPPA, "replaced": "entropy"}


def router_tensors(
    block: RouterBlock, config: Config, entropy_gate: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Buffers of our router gate; its threshold is that of the entropy gate with these buffers."""
    router = Router(config.width, config.gate_options(), 0)
    for name in NETWORK:
        getattr(router, name).copy_(block[name.replace("_", ".")])
    for name in ("mu", "sigma", "updates"):
        getattr(router, name).copy_(entropy_gate[name])
    router.measured.fill_(config.gate_options().explore)  # it was fitted, so it decides
    router.remember(router)
    return dict(router.state_dict())


def router_blocks(
    weights: dict[str, Tensor], config: Config, meta: list[list[int]] | None
) -> tuple[RouterBlock, ...]:
    """Our gates as a router of theirs; meta: fit_meta of each block as it was read, if it was."""
    blocks = []
    for k in range(config.blocks.count):
        gate = below(weights, f"blocks.{k}.gate")
        block = {name.replace("_", "."): gate[name] for name in NETWORK}
        number = int(gate["measured"])
        block["fit_meta"] = torch.tensor(meta[k] if meta else [config.width, 0, k, number])
        blocks.append(block)
    return tuple(blocks)


def write_router(folder: Path, router: Sequence[RouterBlock]) -> None:
    """Write a router into a released folder, bound to the config.json and weights there."""
    from safetensors.torch import save_file

    model, count, hidden = router_model(folder), len(router), len(router[0]["fc1.bias"])
    if count != model.n_blocks:
        raise AmorError(f"{folder}: a router of {count} blocks for a model of {model.n_blocks}")
    tensors = {
        f"blocks.{k}.{name}": t.clone().contiguous()
        for k, block in enumerate(router)
        for name, t in block.items()
    }
    save_file(tensors, folder / ROUTER, metadata={"format": "pt"})
    tree: dict[str, Any] = FORMAT | {"hidden_dim": hidden, "model": typed.tree(model)}
    tree["base_weight_sha256"] = weights_identity(folder)
    tree["router_sha256"] = sha256(folder / ROUTER)
    (folder / ROUTER_CONFIG).write_text(json.dumps(tree, indent=2) + "\n")
