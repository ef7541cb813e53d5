"""A published model on disk, read without trusting it: config.json, and tensors from safetensors or
.bin files, sharded or not.

A .bin file is a pickle, which can run code when it is opened: it is read by torch's loader of
tensors alone, which refuses all else and runs nothing.
"""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from amor import tensors as on_disk
from amor import typed
from amor.convert.settings import Settings
from amor.errors import AmorError, nearest

CONFIG = "config.json"
# the first of these that is there is read: one file, or an index of shards
FILES = (*(on_disk.WEIGHTS, on_disk.INDEX), *("pytorch_model.bin", "pytorch_model.bin.index.json"))


@dataclass(frozen=True)
class SourceFolder:
    """A folder in the layout its library publishes."""

    folder: Path
    tree: dict[str, Any]  # config.json

    @classmethod
    def open(cls, folder: str | Path) -> SourceFolder:
        """Read config.json; tensors are read later."""
        folder = Path(folder)
        if not folder.is_dir():
            raise AmorError(f"{folder}: no such folder; give one that holds {CONFIG} and weights")
        path = folder / CONFIG
        text = typed.read_text(path)
        try:
            # not by typed.py: published configs contain Infinity, which Python's reader takes
            tree = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise AmorError(f"{path}: not JSON ({error})") from None
        if not isinstance(tree, dict):
            raise AmorError(f"{path}: expected an object of keys, not {type(tree).__name__}")
        return cls(folder, tree)

    def settings(self) -> Settings:
        """The keys of config.json."""
        return Settings(self.tree, str(self.folder / CONFIG))

    def tensors(self) -> SourceTensors:
        """Every tensor of the folder, in memory."""
        files = on_disk.weight_files(self.folder, FILES)
        if not files:
            raise AmorError(f"{self.folder} holds no weights; expected {', '.join(FILES)}")
        return SourceTensors(on_disk.read_files(files, read_weights), str(self.folder))


def read_weights(path: Path) -> dict[str, Tensor]:
    """The tensors of one file of either kind."""
    return on_disk.read_file(path) if path.suffix == ".safetensors" else read_bin(path)


def read_bin(path: Path) -> dict[str, Tensor]:
    """The tensors of a pickle, none of whose code is run."""
    try:
        tensors = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise AmorError(
            f"{path} holds more than tensors: a pickle can run code when it is opened, "
            "so it was not; ask for safetensors"
        ) from None
    except Exception as error:  # torch's unpickler raises whatever the bytes lead it to
        reason = " ".join(str(error).split())[:200]
        raise AmorError(
            f"{path} cannot be read as weights ({reason}); it may be cut short, copy it again"
        ) from None
    if not isinstance(tensors, dict) or not all(
        isinstance(name, str) and isinstance(t, Tensor) for name, t in tensors.items()
    ):
        raise AmorError(f"{path}: expected names and tensors, and found something else")
    for name, t in tensors.items():
        if t.dtype not in on_disk.DTYPES.values() or t.is_sparse or t.is_meta:
            kind = str(t.dtype).removeprefix("torch.")
            raise AmorError(f"{path}: {name} is {kind}; read are {', '.join(on_disk.DTYPES)}")
    return {name: t.detach() for name, t in tensors.items()}


class SourceTensors:
    """Tensors that are taken by name, each once and in the shape its config implies.

    `remaining` are those not taken yet; at the end none may be left.
    """

    def __init__(self, tensors: dict[str, Tensor], where: str):
        self.remaining, self.where = dict(tensors), where

    def __contains__(self, name: str) -> bool:
        return name in self.remaining

    def rows(self, name: str) -> int:
        """The size of the first dimension of a tensor."""
        self._require(name)
        if not self.remaining[name].ndim:
            raise AmorError(f"{self.where}: {name} is one number, not a matrix")
        return len(self.remaining[name])

    def take(self, name: str, *shape: int) -> Tensor:
        """The tensor in float32, which represents 16-bit weights exactly."""
        self._require(name)
        t = self.remaining.pop(name)
        if tuple(t.shape) != shape:
            sizes = f"{list(t.shape)}, not {list(shape)}"
            raise AmorError(f"{self.where}: {name} has shape {sizes} as its {CONFIG} says")
        return t.float().contiguous()

    def _require(self, name: str) -> None:
        if name not in self.remaining:
            near = nearest(name, self.remaining).partition("choices: ")[0].strip()
            hint = f"; {near}" if near else ""
            raise AmorError(f"{self.where}: tensor {name!r} is missing{hint}")

    def finish(self, unused: Iterable[str] = ()) -> None:
        """Refuse tensors that are left and match none of the patterns `unused`.

        The model would be another than its config describes.
        """
        for name in sorted(self.remaining):
            if not any(re.fullmatch(pattern, name) for pattern in unused):
                raise AmorError(
                    f"{self.where}: there is no place for tensor {name[:200]!r} "
                    f"in the model its {CONFIG} describes"
                )
