"""A model written in a layout: ours, transformers' face of ours, or another library's own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

from amor.convert.opened import Opened, layout_of
from amor.convert.peer import quiet
from amor.models.folder import save


def write(opened: Opened, to: str, folder: Path) -> None:
    """The model in a layout, and the files of its tokenizer as they were."""
    if to == "hf":
        export(opened, folder)
    elif to == "amor":
        save(opened.model, folder)
        copy_tokenizer(opened, folder)
    else:
        write_theirs(opened, to, folder)
        copy_tokenizer(opened, folder)


def copy_tokenizer(opened: Opened, folder: Path) -> None:
    for path in opened.tokenizer_files:
        shutil.copyfile(path, folder / path.name)


def write_theirs(opened: Opened, to: str, folder: Path) -> None:
    from safetensors.torch import save_file

    tree, tensors = layout_of(to).back(opened.model.config, dict(opened.model.state_dict()))
    (folder / "config.json").write_text(json.dumps(tree, indent=2) + "\n")
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors", metadata={"format": "pt"})


def export(opened: Opened, folder: Path) -> None:
    """By transformers' own `save_pretrained`, from a folder of ours."""
    from amor.hf import export as to_hf

    quiet()
    with TemporaryDirectory(dir=folder.parent) as ours:
        save(opened.model, ours, opened.tokenizer())
        to_hf(ours, folder)
