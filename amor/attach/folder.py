"""An attached model on disk, before its first step."""

from __future__ import annotations

import shutil
from pathlib import Path

from amor.convert.opened import Opened
from amor.errors import AmorError
from amor.files import atomic_folder
from amor.models.amor import Amor
from amor.models.folder import load_config, save


def write(opened: Opened, model: Amor, folder: Path) -> None:

    with atomic_folder(folder) as beside:
        save(model, beside)
        for path in opened.tokenizer_files:
            shutil.copyfile(path, beside / path.name)


def begun(opened: Opened, model: Amor, start: Path) -> None:
    """The model before its first step, written, or there from an earlier call of the same command."""

    if not (start / "config.json").is_file():
        write(opened, model, start)
    elif load_config(start) != model.config:
        raise AmorError(
            f"{start.parent} holds blocks of another kind or backbone; give another --out"
        )
