"""A fitted router of the authors' folders: router_config.json and router.safetensors.

A router predicts each block's normalised entropy from the block's normed input; the prediction is
compared with the block's threshold, so that the head need not be asked. It was fitted to one set
of weights and is refused beside any other.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from msgspec import Meta
from torch import Tensor

from amor import tensors as on_disk
from amor import typed
from amor.config import Config
from amor.convert.authors_facts import KAPPA
from amor.convert.authors_files import SHA256, sha256, weights_identity
from amor.convert.source import CONFIG
from amor.errors import AmorError
from amor.gates.router import NETWORK, Router

ROUTER_CONFIG, ROUTER = "router_config.json", "router.safetensors"
FORMAT = {"format_version": 1, "variant": "distill", "activation": "silu"}
META = 4  # numbers of fit_meta: width, 0, block, and one more


@dataclass(frozen=True)
class RouterBlock:
    """The network of one block: fc2(silu(fc1 x)) + skip x. D: model width, R: hidden size."""

    fc1_weight: Tensor  # [R, D]
    fc1_bias: Tensor  # [R]
    fc2_weight: Tensor  # [1, R]
    fc2_bias: Tensor  # [1]
    skip_weight: Tensor  # [1, D]
    fit_meta: Tensor  # [4] int64: width, 0, block, and one more number

    def double(self) -> RouterBlock:
        """The same in float64."""
        named = {name: getattr(self, name).double() for name in NETWORK}
        return replace(self, **named)

    def predict(self, x: Tensor) -> Tensor:
        """The normalised entropy [...] predicted from the block's normed input x [..., D]."""
        hidden = F.silu(F.linear(x, self.fc1_weight, self.fc1_bias))
        out = F.linear(hidden, self.fc2_weight, self.fc2_bias) + F.linear(x, self.skip_weight)
        return out[..., 0]


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
    """What config.json of a released folder says of its model."""
    path = folder / CONFIG
    tree = typed.json_tree(typed.read_text(path), str(path))
    kwargs = tree.get("model_kwargs") if isinstance(tree, dict) else None
    if not isinstance(kwargs, dict):
        raise AmorError(f"{path} has no model_kwargs, so a router cannot be matched with it")
    facts = {key: kwargs.get(key) for key in ("backbone", "residual_mode", "d_model")}
    facts["n_blocks"] = kwargs.get("n_amor_blocks")
    return typed.convert(RouterModel, facts, f"{path}: model_kwargs")


def read_tensors(path: Path, config: RouterConfig) -> AuthorsRouter:
    """Every tensor of the file, each of its shape and dtype, and no other."""
    width, hidden = config.model.d_model, config.hidden_dim
    with on_disk.opened(path) as file:
        listed = on_disk.listed(file, path)
        wanted: dict[str, tuple[int, ...]] = {}
        for k in range(config.model.n_blocks):
            wanted |= {f"blocks.{k}.{name}": shape for name, shape in shapes(width, hidden).items()}
        for name in sorted(wanted.keys() - listed.keys()):
            raise AmorError(f"{path}: tensor {name!r} is missing")
        for name in sorted(listed.keys() - wanted.keys()):
            raise AmorError(f"{path}: there is no place for tensor {name[:200]!r} in this router")
        for name, shape in wanted.items():
            kind = torch.int64 if name.endswith(".fit_meta") else torch.float32
            right = on_disk.Listed(kind, shape)
            if listed[name] != right:
                raise AmorError(f"{path}: {name} is {_form(listed[name])}, not {_form(right)}")
        held = on_disk.read(file, listed)
    on_disk.check_finite(held, path)
    blocks = []
    for k in range(config.model.n_blocks):
        names = {name: name.replace(".", "_") for name in shapes(width, hidden)}
        one = RouterBlock(**{field: held[f"blocks.{k}.{name}"] for name, field in names.items()})
        fitted = (int(one.fit_meta[0]), int(one.fit_meta[2]))
        if fitted != (width, k):
            said = f"width {fitted[0]} and block {fitted[1]}"
            raise AmorError(f"{path}: blocks.{k}.fit_meta is of {said}, not {width} and {k}")
        blocks.append(one)
    return AuthorsRouter(hidden, tuple(blocks))


def _form(tensor: on_disk.Listed) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


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


def router_options(router: AuthorsRouter) -> dict[str, Any]:
    """Options of our gate."""
    return {"target": "entropy", "hidden": router.hidden_dim, "kappa": KAPPA, "replaced": "entropy"}


def router_tensors(block: RouterBlock, config: Config, weights: dict[str, Tensor], gate: str) -> dict[str, Tensor]:
    """Buffers of our gate named `gate`; its threshold is that of the entropy gate in `weights`."""
    router = Router(config.width, config.gate_options(), 0)
    for name in NETWORK:
        getattr(router, name).copy_(getattr(block, name))
    for name in ("mu", "sigma", "updates"):
        getattr(router, name).copy_(weights[f"{gate}.{name}"])
    router.measured.fill_(config.gate_options().explore)  # it was fitted, so it decides
    router.remember(router)
    return {f"{gate}.{name}": t for name, t in router.state_dict().items()}


def router_of(weights: dict[str, Tensor], config: Config, meta: list[list[int]] | None) -> AuthorsRouter:
    """Our gates as a router of theirs; meta: fit_meta of each block as it was read, if it was."""
    blocks = []
    for k in range(config.blocks.count):
        networks = {name: weights[f"blocks.{k}.gate.{name}"] for name in NETWORK}
        number = int(weights[f"blocks.{k}.gate.measured"])
        fit_meta = torch.tensor(meta[k] if meta else [config.width, 0, k, number])
        blocks.append(RouterBlock(**networks, fit_meta=fit_meta))
    return AuthorsRouter(config.gate_options().hidden, tuple(blocks))


def write_router(folder: Path, router: AuthorsRouter) -> None:
    """Write a router into a released folder, bound to the config.json and weights there."""
    from safetensors.torch import save_file

    model = router_model(folder)
    count = len(router.blocks)
    if count != model.n_blocks:
        raise AmorError(f"{folder}: a router of {count} blocks for a model of {model.n_blocks}")
    held: dict[str, Tensor] = {}
    for k, one in enumerate(router.blocks):
        for name, shape in shapes(model.d_model, router.hidden_dim).items():
            tensor: Tensor = getattr(one, name.replace(".", "_"))
            if tuple(tensor.shape) != shape:
                given = list(tensor.shape)
                raise AmorError(f"router of block {k}: {name} has shape {given}, not {list(shape)}")
            held[f"blocks.{k}.{name}"] = tensor.clone().contiguous()
    save_file(held, folder / ROUTER, metadata={"format": "pt"})
    tree: dict[str, Any] = FORMAT | {"hidden_dim": router.hidden_dim, "model": typed.tree(model)}
    tree["base_weight_sha256"] = weights_identity(folder)
    tree["router_sha256"] = sha256(folder / ROUTER)
    (folder / ROUTER_CONFIG).write_text(json.dumps(tree, indent=2) + "\n")
