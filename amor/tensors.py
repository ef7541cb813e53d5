"""Tensors on disk: safetensors files, alone or as shards that an index names."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from amor import typed
from amor.errors import AmorError

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"  # of shards: which file holds which tensor

# names of safetensors, and what they are here; every other kind (8 bits, complex) is refused
DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F64": torch.float64,
    "I64": torch.int64,
}


@dataclass(frozen=True)
class Listed:
    """Dtype and shape of a tensor, as the header of a file lists them."""

    dtype: torch.dtype
    shape: tuple[int, ...]


@contextmanager
def opened(path: Path, device: str | torch.device = "cpu") -> Iterator[Any]:
    """An open safetensors file inside a `with`; whatever is wrong with it is one line."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), "pt", device=str(device)) as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise AmorError(
            f"{path} cannot be read as safetensors ({error}); it may be cut short, copy it again"
        ) from None


def listed(file: Any, path: Path) -> dict[str, Listed]:
    """Every tensor of an opened file, none of them read."""
    headers: dict[str, Listed] = {}
    for name in file.keys():  # noqa: SIM118 (not a dict)
        part = file.get_slice(name)
        kind = part.get_dtype()
        if kind not in DTYPES:
            raise AmorError(f"{path}: {name} is {kind}; read are {', '.join(DTYPES)}")
        headers[name] = Listed(DTYPES[kind], tuple(part.get_shape()))
    return headers


def read(file: Any, names: Iterable[str]) -> dict[str, Tensor]:
    """The named tensors of an opened file, copied to aligned memory.

    In a file tensors lie at any address, and torch's products of few rows round by it.
    """
    return {name: file.get_tensor(name).clone() for name in names}


def write(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors in host memory as a safetensors file; a full disk is an OSError as elsewhere.

    safetensors raises an error type of its own and puts the system's error number into the text.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(dict(tensors), str(path), metadata={"format": "pt"})
    except SafetensorError as error:
        number = re.search(r"\(os error (\d+)\)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error


def read_file(path: Path, device: str | torch.device = "cpu") -> dict[str, Tensor]:
    """Every tensor of one safetensors file."""
    with opened(path, device) as file:
        return read(file, listed(file, path))


def read_files(
    paths: Iterable[Path], reader: Callable[[Path], dict[str, Tensor]] = read_file
) -> dict[str, Tensor]:
    """The tensors of several files, all finite; one that stands in two of them is refused.

    reader: reads one file.
    """
    tensors: dict[str, Tensor] = {}
    for path in paths:
        part = reader(path)
        for name in sorted(tensors.keys() & part.keys()):
            raise AmorError(f"{path}: tensor {name[:200]!r} is in another shard too")
        check_finite(part, path)
        tensors |= part
    return tensors


def weight_files(folder: Path, names: Iterable[str] = (WEIGHTS, INDEX)) -> list[Path]:
    """The weight files of a folder: the first of `names` that exists, or the shards an index lists.

    Empty where the folder has none of them.
    """
    path = next((folder / name for name in names if (folder / name).is_file()), None)
    if path is None:
        return []
    return _shards(path) if path.suffix == ".json" else [path]


def _shards(index: Path) -> list[Path]:
    """The files beside an index that its weight_map (tensor name -> file name) names.

    An index comes from elsewhere, so a name with a path in it (../secret) is refused, not opened.
    """
    tree = typed.json_tree(typed.read_text(index), str(index))
    names = tree.get("weight_map") if isinstance(tree, dict) else None
    if (
        not isinstance(names, dict)
        or not names
        or not all(isinstance(name, str) for name in names.values())
    ):
        raise AmorError(f"{index}: no weight_map of tensor names to files")
    files = sorted(set(names.values()))
    for name in files:
        if not re.fullmatch(r"[\w.-]+\.(safetensors|bin)", name):
            raise AmorError(
                f"{index}: {name[:200]!r} is no shard beside it; shards are named as {WEIGHTS}"
            )
        if not (index.parent / name).is_file():
            raise AmorError(f"{index} names {name}, which is not there; copy the folder again")
    return [index.parent / name for name in files]


def check_finite(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Refuse NaN and infinity by the name of their tensor, before a model computes with them."""
    for name, t in tensors.items():
        # the least and largest number: one pass, no memory, and a NaN is both
        if (
            t.is_floating_point()
            and t.numel()
            and not bool(torch.isfinite(torch.stack(torch.aminmax(t))).all())
        ):
            raise AmorError(f"{path}: {name} holds a number that is not finite")
