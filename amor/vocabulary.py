"""Reads a tokenizer.json, or refuses it in one line; and how many embedding rows its ids need."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from amor import typed
from amor.checks import MOST_TOKENS
from amor.errors import AmorError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

NAMES = "bytes, bpe:SIZE, llama-3.1, or the path of a tokenizer.json"
# a prefix that is not empty; looked for in the text, since parsing large files twice takes a second
PREFIX = re.compile(rb'"continuing_subword_prefix"\s*:\s*"[^"]')


def load_file(path: str | Path) -> Tokenizer:
    """The tokenizer of a tokenizer.json, or of the folder that holds one.

    It encodes a word before it is returned, so that a file on which the library panics (missing
    special tokens, an empty pattern) is refused here and not in the middle of the work.
    """
    from tokenizers import Tokenizer

    path = Path(path) / "tokenizer.json" if Path(path).is_dir() else Path(path)
    if not path.is_file():
        raise AmorError(f"no file {path}; a tokenizer is {NAMES}")
    _check_prefix(path)
    with _library_errors(path):
        tokenizer = Tokenizer.from_file(str(path))
    size = vocabulary(tokenizer)
    if not 1 <= size <= MOST_TOKENS:  # before it encodes: the library counts every id up to that
        raise AmorError(
            f"{path}: ids need a vocabulary of {size:,}; it may be 1 to {MOST_TOKENS:,}"
        )
    with _library_errors(path), suppress(Exception):  # a vocabulary need not spell this word
        tokenizer.encode("a word", add_special_tokens=True)
    return tokenizer


@contextmanager
def _library_errors(path: Path) -> Iterator[None]:
    """Turn a plain Exception or pyo3's PanicException, a BaseException, into an AmorError."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise AmorError(
            f"{path} is not a tokenizer.json that the package tokenizers can read ({error})"
        ) from error


def _check_prefix(path: Path) -> None:
    """Refuse BPE merges whose second half lacks the prefix of continuing subwords.

    The library cuts as many bytes off without looking, and aborts the process where that splits a
    character.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise AmorError(f"{path}: cannot be read ({error})") from None
    if not PREFIX.search(data):
        return
    tree = typed.json_tree(data, str(path))
    model = tree.get("model") if isinstance(tree, dict) else None
    if not isinstance(model, dict) or not isinstance(model.get("merges"), list):
        return  # not BPE, or the library refuses it
    prefix = model.get("continuing_subword_prefix")
    if not isinstance(prefix, str):
        return  # the library refuses it
    for merge in model["merges"]:
        if not _second_half(merge).startswith(prefix):
            raise AmorError(
                f"{path}: model.continuing_subword_prefix is {prefix[:80]!r}, but merges such as "
                f"{str(merge)[:80]!r} are without it"
            )


def _second_half(merge: Any) -> str:
    """Of "a b" or ["a", "b"]; empty where it is neither."""
    halves = merge.split(" ") if isinstance(merge, str) else merge
    whole = isinstance(halves, list) and len(halves) == 2 and isinstance(halves[1], str)
    return halves[1] if whole else ""


def vocabulary(tokenizer: Tokenizer) -> int:
    """How many rows an embedding needs: one more than the largest id, for ids may have gaps."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
