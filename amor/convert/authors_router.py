"""A fitted router of the authors' folders: router_config.json and router.safetensors, read strictly and written.

A router predicts each block's normalised entropy from the block's normed input; the prediction is compared with the block's
threshold, so that the head need not be asked. It was fitted to one set of weights and is refused beside any other.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from msgspec import Meta
from torch import Tensor

from amor import tensors as on_disk
from amor import typed
from amor.convert.authors_files import SHA256, sha256, weights_identity
from amor.convert.source import CONFIG
from amor.errors import AmorError

ROUTER_CONFIG, ROUTER = "router_config.json", "router.safetensors"
FORMAT = {"format_version": 1, "variant": "distill", "activation": "silu"}
META = 4  # numbers of fit_meta: width, 0, block, and one more


@dataclass(frozen=True)
class RouterBlock:
    """The network of one block: fc2(silu(fc1 x)) + skip x. D is the model's width, R the hidden size."""

    fc1_weight: Tensor  # [R, D]
    fc1_bias: Tensor  # [R]
    fc2_weight: Tensor  # [1, R]
    fc2_bias: Tensor  # [1]
    skip_weight: Tensor  # [1, D]
    fit_meta: Tensor  # [4] int64: width, 0, block, and one more number

    def predict(self, x: Tensor) -> Tensor:
        """The normalised entropy [...] predicted from the block's normed input x [..., D]."""
        hidden = F.silu(F.linear(x, self.fc1_weight, self.fc1_bias))
        return (F.linear(hidden, self.fc2_weight, self.fc2_bias) + F.linear(x, self.skip_weight))[..., 0]


@dataclass(frozen=True)
class AuthorsRouter:
    hidden_dim: int
    blocks: tuple[RouterBlock, ...]  # one per gated block


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


def read_router(folder: Path) -> AuthorsRouter | None:
    """The router of a released folder, None where it has none; refused where it does not belong to these weights."""
    there = [name for name in (ROUTER_CONFIG, ROUTER) if (folder / name).is_file()]
    if not there:
        return None
    path = folder / ROUTER_CONFIG
    if len(there) == 1:
        raise AmorError(f"{folder} holds {there[0]} alone; a router is {ROUTER_CONFIG} and {ROUTER}")
    config = typed.read(RouterConfig, path)
    for key, value in FORMAT.items():
        if getattr(config, key) != value:
            raise AmorError(f"{path}: {key} is {getattr(config, key)!r}; read is {value!r}")
    model = router_model(folder)
    if config.model != model:
        raise AmorError(f"{path} is of another model: {config.model}, but {CONFIG} says {model}")
    if config.base_weight_sha256 != weights_identity(folder):
        raise AmorError(f"{path}: this router was fitted to other weights than those beside it (base_weight_sha256)")
    if config.router_sha256 != sha256(folder / ROUTER):
        raise AmorError(f"{folder / ROUTER} is not the file that {ROUTER_CONFIG} names (router_sha256); copy it again")
    return read_tensors(folder / ROUTER, config)


def router_model(folder: Path) -> RouterModel:
    """What config.json of a released folder says of its model."""
    path = folder / CONFIG
    tree = typed.json_tree(typed.read_text(path), str(path))
    kwargs = tree.get("model_kwargs") if isinstance(tree, dict) else None
    if not isinstance(kwargs, dict):
        raise AmorError(f"{path} has no model_kwargs, so a router cannot be matched with it")
    names = {"n_blocks": "n_amor_blocks"}
    facts = {key: kwargs.get(names.get(key, key)) for key in ("backbone", "residual_mode", "d_model", "n_blocks")}
    return typed.convert(RouterModel, facts, f"{path}: model_kwargs")


def read_tensors(path: Path, config: RouterConfig) -> AuthorsRouter:
    """Every tensor of the file, each of its shape and dtype, and no other."""
    width, hidden = config.model.d_model, config.hidden_dim
    with on_disk.opened(path) as file:
        listed = on_disk.listed(file, path)
        wanted = {f"blocks.{k}.{n}": s for k in range(config.model.n_blocks) for n, s in shapes(width, hidden).items()}
        for name in sorted(wanted.keys() - listed.keys()):
            raise AmorError(f"{path}: tensor {name!r} is missing")
        for name in sorted(listed.keys() - wanted.keys()):
            raise AmorError(f"{path}: there is no place for tensor {name[:200]!r} in this router")
        for name, shape in wanted.items():
            kind = torch.int64 if name.endswith(".fit_meta") else torch.float32
            if listed[name] != on_disk.Listed(kind, shape):
                found = f"{str(listed[name].dtype).removeprefix('torch.')} {list(listed[name].shape)}"
                raise AmorError(f"{path}: {name} is {found}, not {str(kind).removeprefix('torch.')} {list(shape)}")
        held = on_disk.read(file, listed)
    on_disk.check_finite(held, path)
    blocks = []
    for k in range(config.model.n_blocks):
        one = RouterBlock(**{name.replace(".", "_"): held[f"blocks.{k}.{name}"] for name in shapes(width, hidden)})
        fitted = (int(one.fit_meta[0]), int(one.fit_meta[2]))
        if fitted != (width, k):
            raise AmorError(f"{path}: blocks.{k}.fit_meta is of width {fitted[0]} and block {fitted[1]}, not {width} and {k}")
        blocks.append(one)
    return AuthorsRouter(hidden, tuple(blocks))


def shapes(width: int, hidden: int) -> dict[str, tuple[int, ...]]:
    """Tensors of one block."""
    return {
        "fc1.weight": (hidden, width),
        "fc1.bias": (hidden,),
        "fc2.weight": (1, hidden),
        "fc2.bias": (1,),
        "skip.weight": (1, width),
        "fit_meta": (META,),
    }


def write_router(folder: Path, router: AuthorsRouter) -> None:
    """Write a router into a released folder whose config.json and weights are there already: it is bound to those."""
    from safetensors.torch import save_file

    model = router_model(folder)
    if len(router.blocks) != model.n_blocks:
        raise AmorError(f"{folder}: a router of {len(router.blocks)} blocks for a model of {model.n_blocks}")
    held: dict[str, Tensor] = {}
    for k, one in enumerate(router.blocks):
        for name, shape in shapes(model.d_model, router.hidden_dim).items():
            tensor: Tensor = getattr(one, name.replace(".", "_"))
            if tuple(tensor.shape) != shape:
                raise AmorError(f"router of block {k}: {name} has shape {list(tensor.shape)}, not {list(shape)}")
            held[f"blocks.{k}.{name}"] = tensor.clone().contiguous()
    save_file(held, folder / ROUTER, metadata={"format": "pt"})
    tree: dict[str, Any] = FORMAT | {"hidden_dim": router.hidden_dim, "model": typed.tree(model)}
    tree |= {"base_weight_sha256": weights_identity(folder), "router_sha256": sha256(folder / ROUTER)}
    (folder / ROUTER_CONFIG).write_text(json.dumps(tree, indent=2) + "\n")
