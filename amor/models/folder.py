"""A model on disk: config.json, model.safetensors and, where there is one, tokenizer.json, in one
folder.

Folders that transformers wrote (amor/hf) are read too: our config is inside theirs, and weights may
be cut into shards.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from amor import tensors as on_disk
from amor import typed
from amor.config import Config
from amor.errors import AmorError, nearest
from amor.files import atomic_write, replace_file
from amor.gates.base import RENAMED_BUFFERS
from amor.models.amor import Amor
from amor.tensors import WEIGHTS
from amor.vocabulary import load_file

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CONFIG, TOKENIZER = "config.json", "tokenizer.json"
MODEL_TYPE = "amor"  # in a config.json of transformers
FLOAT32 = ("A_log", "dt_bias", "D")  # of recurrences: may stay in float32 beside weights of 16 bits
LATEST = "latest"  # in a run directory: a link to its newest checkpoint, which is a model folder


def save(model: Amor, folder: str | Path, tokenizer: Tokenizer | None = None) -> None:
    """Write a model folder, each file whole or not at all."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: t.detach().contiguous().cpu() for name, t in model.state_dict().items()}
    with atomic_write(folder / WEIGHTS) as beside:
        on_disk.write(beside, tensors)
    replace_file(folder / CONFIG, model.config.to_json() + "\n")
    if tokenizer is not None:
        replace_file(folder / TOKENIZER, tokenizer.to_str(pretty=True))


def resolve(path: str | Path) -> Path:
    """The model folder a path means: itself, or the newest checkpoint of a run directory."""
    path = Path(path)
    if (path / LATEST).exists():
        return path / LATEST
    if (path / "checkpoints").is_dir() and not (path / WEIGHTS).exists():
        raise AmorError(
            f"{path} is a run without a checkpoint yet, so it holds no model; train it first"
        )
    return path


def load_config(folder: str | Path) -> Config:
    """The config of a model folder or of a run's newest model."""
    folder = resolve(folder)
    path = folder / CONFIG
    if not path.is_file():
        raise AmorError(
            f"{folder} holds no {CONFIG}; a model folder has {CONFIG}, {WEIGHTS} and {TOKENIZER}"
        )
    tree = typed.json_tree(typed.read_text(path), str(path))
    if isinstance(tree, dict) and "model_type" in tree:
        if tree["model_type"] != MODEL_TYPE:
            raise AmorError(
                f"{path}: model_type is {str(tree['model_type'])[:80]!r}; a model of amor has "
                f"{MODEL_TYPE!r}; convert this one with: amor convert {folder} --out FOLDER"
            )
        return Config.from_dict(tree.get("amor", {}), f"{path}: amor")
    return Config.from_dict(tree, str(path))


def list_weights(folder: Path, config: Config) -> dict[Path, dict[str, on_disk.Listed]]:
    """Every file of a folder's weights with what it lists, if together they are what a model of
    this config holds.
    """
    found: dict[Path, dict[str, on_disk.Listed]] = {}
    together: dict[str, on_disk.Listed] = {}
    files = on_disk.weight_files(folder)
    if not files:
        raise AmorError(
            f"{folder} holds no {WEIGHTS}; a model folder has {CONFIG}, {WEIGHTS} and {TOKENIZER}"
        )
    for path in files:
        with on_disk.opened(path) as file:
            found[path] = on_disk.listed(file, path)
        for name in sorted(found[path].keys() & together.keys()):
            raise AmorError(f"{path}: tensor {name[:200]!r} is in another shard too")
        together |= found[path]
    with torch.device("meta"):
        _fits(Amor(config), together, path if len(found) == 1 else folder)
    return found


def load_model(folder: str | Path, device: str | torch.device = "cpu") -> Amor:
    """The model of a folder, or a run's newest; a tensor that is missing, extra, misshapen or not
    finite is an error.
    """
    folder = resolve(folder)
    config = load_config(folder)
    with torch.device("meta"):
        model = Amor(config)
    files = list_weights(folder, config)
    model.load_state_dict(
        on_disk.read_files(files, partial(on_disk.read_file, device=device)), assign=True
    )
    return model


def _fits(model: Amor, found: dict[str, on_disk.Listed], path: Path) -> None:
    """Every tensor of the model is in the file, nothing else is, and each has its shape and a dtype
    the model can be in.
    """
    wanted = model.state_dict()
    for name in sorted(found.keys() - wanted.keys()):
        owner, _, last = name.rpartition(".")
        if owner.endswith(".gate") and (now := RENAMED_BUFFERS.get(last)):
            raise AmorError(
                f"{path}: written by an earlier amor: tensor {name} is now {owner}.{now}"
            )
        raise AmorError(
            f"{path} does not fit its config: no tensor {name[:200]!r}; {_nearest(name, wanted)}"
        )
    for name in sorted(wanted.keys() - found.keys()):
        raise AmorError(f"{path} does not fit its config: tensor {name!r} is missing")
    kind = found["embed.weight"].dtype
    # weights are all in one; statistics of gates, and what FLOAT32 names, may stay in float32
    one = kind if kind.is_floating_point else torch.float32
    weights = dict(model.named_parameters())
    for name, tensor in wanted.items():
        shape, dtype = found[name].shape, found[name].dtype
        if shape != tuple(tensor.shape):
            raise AmorError(
                f"{path} does not fit its config: {name} has shape {list(shape)}, not "
                f"{list(tensor.shape)}"
            )
        fitting = (one, torch.float32) if tensor.is_floating_point() else (tensor.dtype,)
        if name in weights and name.rpartition(".")[2] not in FLOAT32:
            fitting = (one,)
        if dtype not in fitting:
            allowed = " or ".join(str(d).removeprefix("torch.") for d in fitting)
            raise AmorError(
                f"{path}: {name} is {str(dtype).removeprefix('torch.')}, not {allowed} as the "
                "model's other tensors"
            )


def _nearest(name: str, wanted: Iterable[str]) -> str:
    """Of the hint the nearest name only: all of them would be hundreds."""
    hint = nearest(name[:200], wanted)
    return hint.partition("choices: ")[0].strip() or "the config has no such part"


def load(folder: str | Path, device: str | torch.device = "cpu") -> tuple[Amor, Tokenizer | None]:
    """The model of a folder, or a run's newest, ready to read, and its tokenizer (None where there
    is none).
    """
    folder = resolve(folder)
    model = load_model(folder, device).eval()
    path = folder / TOKENIZER
    if not path.is_file():
        return model, None
    return model, load_file(path)
