"""A tokenizer.json: read, or refused in one line, and how many rows of an embedding its ids need."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from amor.checks import MOST_TOKENS
from amor.errors import AmorError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

NAMES = "bytes, bpe:SIZE, llama-3.1, or the path of a tokenizer.json"


def load_file(path: str | Path) -> Tokenizer:
    from tokenizers import Tokenizer

    path = Path(path) / "tokenizer.json" if Path(path).is_dir() else Path(path)
    if not path.is_file():
        raise AmorError(f"no file {path}; a tokenizer is {NAMES}")
    try:
        found = Tokenizer.from_file(str(path))
    except (
        Exception
    ) as error:  # the library raises plain Exception for whatever is wrong in the file
        raise AmorError(
            f"{path} is not a tokenizer.json that the package tokenizers can read ({error})"
        ) from error
    if (
        not 1 <= vocabulary(found) <= MOST_TOKENS
    ):  # asked first: the library counts every id up to the largest
        raise AmorError(
            f"{path}: ids need a vocabulary of {vocabulary(found):,}; it may be 1 to {MOST_TOKENS:,}"
        )
    return found


def vocabulary(tokenizer: Tokenizer) -> int:
    """How many rows an embedding needs: one more than the largest id, for ids may have gaps."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
