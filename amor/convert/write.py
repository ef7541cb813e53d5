"""A model written in a layout: ours, transformers' face of ours, or another library's own."""

from __future__ import annotations

import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

from amor.convert.opened import Opened, layout_of
from amor.convert.peer import library
from amor.models.folder import TOKENIZER, save


def write(opened: Opened, to: str, folder: Path, shard: int | None = None) -> list[str]:
    """The model in a layout, and its tokenizer; what there is to note. shard: most bytes of a file."""
    notes: list[str] = []
    if to == "hf":
        export(opened, folder, shard)
        return notes
    if to == "amor":
        save(opened.model, folder)
        if opened.layout is not None and opened.source is not None:
            for name, text in opened.layout.keep(opened.source).items():
                (folder / name).write_text(text)
    else:
        weights = dict(opened.model.state_dict())
        notes = layout_of(to).write(opened.model.config, weights, folder, opened.folder, shard)
    copy_tokenizer(opened, folder)
    return notes


def copy_tokenizer(opened: Opened, folder: Path) -> None:
    """The tokenizer given, or the files of the model's own as they were."""
    if opened.given is not None:
        (folder / TOKENIZER).write_text(opened.given.to_str(pretty=True), encoding="utf-8")
        return
    for path in opened.tokenizer_files:
        shutil.copyfile(path, folder / path.name)


def export(opened: Opened, folder: Path, shard: int | None = None) -> None:
    """By transformers' own `save_pretrained`, from a folder of ours."""
    from amor.hf import export as to_hf

    library()
    with TemporaryDirectory(dir=folder.parent) as ours:
        save(opened.model, ours, opened.tokenizer())
        to_hf(ours, folder, shard="50GB" if shard is None else shard)
