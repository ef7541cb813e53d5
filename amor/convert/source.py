"""A published model on disk, read without trusting it: config.json, and tensors from safetensors or .bin files, sharded or not.

A .bin file is a pickle, which can run code when it is opened: it is read by torch's loader of tensors alone, which refuses all
else and runs nothing.
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
from amor.errors import AmorError, nearest

CONFIG = "config.json"
# in the order they are looked for: one file, or an index that names several
FILES = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
# what a tokenizer may lie in; copied as they are
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "tokenizer.model", "chat_template.jinja"),
)


@dataclass(frozen=True)
class Source:
    """A folder in the layout its library publishes."""

    folder: Path
    tree: dict[str, Any]  # config.json

    @classmethod
    def open(cls, folder: str | Path) -> Source:
        folder = Path(folder)
        if not folder.is_dir():
            raise AmorError(f"{folder}: no such folder; give one that holds {CONFIG} and weights")
        path = folder / CONFIG
        try:
            # not by typed.py: published configs write Infinity, which Python's reader takes
            tree = json.loads(typed.read_text(path))
        except (ValueError, RecursionError) as error:
            if isinstance(error, AmorError):
                raise
            raise AmorError(f"{path}: not JSON ({error})") from None
        if not isinstance(tree, dict):
            raise AmorError(f"{path}: expected an object of keys, not {type(tree).__name__}")
        return cls(folder, tree)

    def tensors(self) -> Tensors:
        """Every tensor of the folder, in memory."""
        found = next((self.folder / name for name in FILES if (self.folder / name).is_file()), None)
        if found is None:
            raise AmorError(f"{self.folder} holds no weights; expected {', '.join(FILES)}")
        files = on_disk.shard_files(found) if found.suffix == ".json" else [found]
        return Tensors(on_disk.read_files(files, read_weights), str(self.folder))


def read_weights(path: Path) -> dict[str, Tensor]:
    """The tensors of one file of either kind."""
    return on_disk.read_file(path) if path.suffix == ".safetensors" else read_bin(path)


def read_bin(path: Path) -> dict[str, Tensor]:
    """The tensors of a pickle, none of whose code is run."""
    try:
        held = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise AmorError(
            f"{path} holds more than tensors: a pickle can run code when it is opened, so it was not; ask for safetensors"
        ) from None
    except (RuntimeError, EOFError, OSError, ValueError) as error:
        words = " ".join(str(error).split())[:200]
        raise AmorError(f"{path} cannot be read as weights ({words}); it may be cut short, copy it again") from None
    if not isinstance(held, dict) or not all(isinstance(k, str) and isinstance(t, Tensor) for k, t in held.items()):
        raise AmorError(f"{path}: expected names and tensors, and found something else")
    for name, t in held.items():
        if t.dtype not in on_disk.DTYPES.values() or t.is_sparse or t.is_meta:
            raise AmorError(f"{path}: {name} is {str(t.dtype).removeprefix('torch.')}; read are {', '.join(on_disk.DTYPES)}")
    return {name: t.detach() for name, t in held.items()}


class Tensors:
    """Tensors to be taken out by name, each once and of the shape its config gives it; at the end none may be left."""

    def __init__(self, held: dict[str, Tensor], where: str):
        self.held, self.where = dict(held), where

    def __contains__(self, name: str) -> bool:
        return name in self.held

    def rows(self, name: str) -> int:
        """How many rows a tensor has."""
        self._there(name)
        if not self.held[name].ndim:
            raise AmorError(f"{self.where}: {name} is one number, not a matrix")
        return len(self.held[name])

    def take(self, name: str, *shape: int) -> Tensor:
        """In float32: weights of 16 bits are those numbers exactly."""
        self._there(name)
        t = self.held.pop(name)
        if tuple(t.shape) != shape:
            raise AmorError(f"{self.where}: {name} has shape {list(t.shape)}, not {list(shape)} as its {CONFIG} says")
        return t.float().contiguous()

    def _there(self, name: str) -> None:
        if name not in self.held:
            near = nearest(name, self.held).partition("choices: ")[0].strip()
            raise AmorError(f"{self.where}: tensor {name!r} is missing" + (f"; {near}" if near else ""))

    def finish(self, unused: Iterable[str] = ()) -> None:
        """Whatever is left and is not `unused` (patterns) means that the model is another than its config says."""
        for name in sorted(self.held):
            if not any(re.fullmatch(pattern, name) for pattern in unused):
                raise AmorError(f"{self.where}: there is no place for tensor {name[:200]!r} in the model its {CONFIG} describes")
