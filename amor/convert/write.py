"""A model written in a layout: ours, ours for transformers, or another library's own."""

from __future__ import annotations

import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

from amor.convert.opened import Opened, layout_of
from amor.convert.peer import library
from amor.models.folder import TOKENIZER, save

# files that a tokenizer may consist of; copied as they are
TOKENIZER_FILES = (
    *(TOKENIZER, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "tokenizer.model", "chat_template.jinja"),
)


def write(opened: Opened, to: str, folder: Path, shard: int | None = None) -> list[str]:
    """Write the model in the layout `to`, with its tokenizer; returns remarks for the user.

    shard: most bytes of one weight file.
    """
    if to == "hf":
        export(opened, folder, shard)
        return []
    notes: list[str] = []
    if to == "amor":
        save(opened.model, folder)
        for name, text in opened.layout.keep().items() if opened.layout else ():
            (folder / name).write_text(text)
    else:
        weights = dict(opened.model.state_dict())
        notes = layout_of(to).write(opened.model.config, weights, folder, opened.folder, shard)
    copy_tokenizer(opened, folder)
    return notes


def copy_tokenizer(opened: Opened, folder: Path) -> None:
    """Write the tokenizer that the user named, or copy the files of the model's own."""
    if opened.replaced_tokenizer is not None:
        text = opened.replaced_tokenizer.to_str(pretty=True)
        (folder / TOKENIZER).write_text(text, encoding="utf-8")
        return
    for path in (opened.folder / name for name in TOKENIZER_FILES):
        if path.is_file():
            shutil.copyfile(path, folder / path.name)


def export(opened: Opened, folder: Path, shard: int | None = None) -> None:
    """Write it by transformers' own `save_pretrained`, from a folder of ours."""
    from amor.hf import export as to_hf

    library()
    with TemporaryDirectory(dir=folder.parent) as ours:
        save(opened.model, ours, opened.tokenizer())
        to_hf(ours, folder, shard="50GB" if shard is None else shard)
