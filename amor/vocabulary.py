"""A tokenizer.json: read, or refused in one line, and how many rows of an embedding its ids need."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from amor.checks import MOST_TOKENS
from amor.errors import AmorError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# What tokenizers in use call the token before the first of a text, in the order of search.
BOS_TOKENS = ("<|begin_of_text|>", "<s>", "<bos>", "<|bos|>", "[BOS]", "<|begin▁of▁sentence|>")
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
    found.no_truncation()  # a file of a model with a short context may hold either
    found.no_padding()
    return found


def vocabulary(tokenizer: Tokenizer) -> int:
    """How many rows an embedding needs: one more than the largest id, for ids may have gaps."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1


def prefix_ids(tokenizer: Tokenizer, add_bos: bool | None = None) -> list[int]:
    """Token ids to put in front of a text, the same everywhere a model reads a prompt.

    Args:
        tokenizer: its post-processor is the template that tokenizer.json declares, for instance
            Llama's "<s> text".
        add_bos: None adds what the post-processor puts in front of a text, as transformers does,
            so a tokenizer without one (all that `amor prepare` trains) adds nothing. False adds
            nothing. True adds the same as None, or else the BOS token found by its name, and is
            an error where the tokenizer has none.
    """
    if add_bos is False:
        return []
    post = tokenizer.post_processor
    if post is not None and post.num_special_tokens_to_add(False):
        text = tokenizer.encode("a", add_special_tokens=False)
        whole = post.process(text).ids
        starts = range(len(whole) - len(text.ids) + 1)
        added = next((i for i in starts if whole[i : i + len(text.ids)] == text.ids), 0)
        if added:
            return whole[:added]
    if add_bos is None:
        return []
    for name in BOS_TOKENS:
        token = tokenizer.token_to_id(name)
        if token is not None:
            return [token]
    raise AmorError(
        "the tokenizer has no BOS token to put in front of a text (its post-processor adds none, "
        f"and it has none of {', '.join(BOS_TOKENS)}); leave --bos out"
    )
