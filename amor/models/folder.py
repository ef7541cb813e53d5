"""A model on disk: config.json, model.safetensors and, where there is one, tokenizer.json, in one folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from amor.config import Config
from amor.errors import AmorError
from amor.files import replace_file, replacing
from amor.models.amor import Amor

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CONFIG, WEIGHTS, TOKENIZER = "config.json", "model.safetensors", "tokenizer.json"
LATEST = "latest"  # in a run directory: a link to its newest checkpoint, which is a model folder


def save(model: Amor, folder: str | Path, tokenizer: Tokenizer | None = None) -> None:
    """Write a model folder, each file whole or not at all."""
    from safetensors.torch import save_file

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: t.detach().contiguous().cpu() for name, t in model.state_dict().items()}
    with replacing(folder / WEIGHTS) as beside:
        save_file(tensors, str(beside), metadata={"format": "pt"})
    replace_file(folder / CONFIG, model.config.to_json() + "\n")
    if tokenizer is not None:
        replace_file(folder / TOKENIZER, tokenizer.to_str(pretty=True))


def resolve(path: str | Path) -> Path:
    """The model folder a path means: itself, or the newest checkpoint of a run directory."""
    path = Path(path)
    if (path / LATEST).exists():
        return path / LATEST
    if (path / "checkpoints").is_dir() and not (path / WEIGHTS).exists():
        raise AmorError(f"{path} is a run without a checkpoint yet, so it holds no model; train it first")
    return path


def load_config(folder: str | Path) -> Config:
    """The config of a model folder or of a run's newest model."""
    folder = resolve(folder)
    path = folder / CONFIG
    if not path.is_file():
        raise AmorError(f"{folder} holds no {CONFIG}; a model folder has {CONFIG}, {WEIGHTS} and {TOKENIZER}")
    try:
        return Config.from_dict(json.loads(path.read_text()))
    except json.JSONDecodeError as error:
        raise AmorError(f"{path} is not JSON ({error})") from error


def load_model(folder: str | Path, device: str | torch.device = "cpu") -> Amor:
    """The model of a folder, or a run's newest; a missing, extra or misshapen tensor is an error, never a warning."""
    from safetensors import SafetensorError, safe_open

    folder = resolve(folder)
    config = load_config(folder)
    path = folder / WEIGHTS
    if not path.is_file():
        raise AmorError(f"{folder} holds no {WEIGHTS}; a model folder has {CONFIG}, {WEIGHTS} and {TOKENIZER}")
    try:
        with safe_open(str(path), "pt", device=str(device)) as file:
            # copied: in a file tensors lie at any address, and torch's products of a few rows round by how a weight lies
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 (not a dict)
    except SafetensorError as error:
        raise AmorError(f"{path} cannot be read ({error}); it may be cut short, copy it again") from error
    with torch.device("meta"):
        model = Amor(config)
    wanted = {name: tuple(t.shape) for name, t in model.state_dict().items()}
    wrong = sorted(wanted.keys() ^ tensors.keys()) or sorted(n for n in wanted if wanted[n] != tuple(tensors[n].shape))
    if wrong:
        raise AmorError(f"{path} does not fit its config: {len(wrong)} tensors differ, first {wrong[0]!r}")
    model.load_state_dict(tensors, assign=True)
    return model


def load(folder: str | Path, device: str | torch.device = "cpu") -> tuple[Amor, Tokenizer | None]:
    """The model of a folder, or a run's newest, ready to read, and its tokenizer (None where there is none)."""
    folder = resolve(folder)
    model = load_model(folder, device).eval()
    path = folder / TOKENIZER
    if not path.is_file():
        return model, None
    from tokenizers import Tokenizer

    return model, Tokenizer.from_file(str(path))
