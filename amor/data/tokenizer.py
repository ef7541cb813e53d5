"""Tokenizers by name: `bytes`, `bpe:4096` (trained on the user's text), `llama-3.1`, or the path of
a tokenizer.json.

All four are a `tokenizers.Tokenizer`, so that one tokenizer.json can be stored with the data and
with the model.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from tokenizers.pre_tokenizers import ByteLevel

from amor.errors import AmorError
from amor.vocabulary import NAMES, load_file

END_OF_TEXT = "<|end_of_text|>"
# What tokenizers in use call the end of a document, in the order they are looked for.
ENDS = (END_OF_TEXT, "<|endoftext|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "<|end▁of▁sentence|>")


def bpe_size(name: str) -> int | None:
    """The size in `bpe:SIZE`; None for any other name."""
    match = re.fullmatch(r"bpe:([0-9][0-9_,]{0,20})", name)
    if match is None:
        if name.startswith("bpe"):
            raise AmorError(f"tokenizer {name[:40]!r} has no size; write for instance bpe:4096")
        return None
    size = int(re.sub("[_,]", "", match[1]))
    if not 257 <= size <= 1 << 20:
        raise AmorError(
            f"tokenizer {name!r}: a size is 257 (256 bytes and {END_OF_TEXT}) to {1 << 20}"
        )
    return size


def check_text(text: str, what: str) -> None:
    """Refuse half of a surrogate pair: Python carries it where bytes were not UTF-8, but it is no
    text.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise AmorError(
            f"{what} is not UTF-8 text: character {error.start + 1} is no character"
        ) from None


def load(name: str) -> Tokenizer:
    """The tokenizer of a name that needs no text."""
    if name == "bytes":
        return bytes_tokenizer()
    if name == "llama-3.1":
        from amor.data.llama import llama_tokenizer

        return llama_tokenizer()
    if bpe_size(name):
        raise AmorError(
            f"tokenizer {name!r} is trained on text, by amor prepare; here give the "
            "tokenizer.json it wrote"
        )
    if Path(name).exists() or name.endswith(".json"):
        return load_file(name)
    raise AmorError(f"no tokenizer {name!r}; give {NAMES}")


def byte_letters() -> dict[int, str]:
    """Byte -> the printable character that stands for it in a byte-level vocabulary (GPT-2's
    table).

    Printable latin-1 bytes stand for themselves, the others take the characters from 256 on, in
    order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in set(printable)]
    return {**{b: chr(b) for b in printable}, **{b: chr(256 + i) for i, b in enumerate(others)}}


def bytes_tokenizer() -> Tokenizer:
    """The UTF-8 bytes themselves: id = byte, and 256 for the end of a text."""
    tokenizer = Tokenizer(
        models.BPE(vocab={letter: byte for byte, letter in byte_letters().items()}, merges=[])
    )
    # The regex cuts text into words, which a cache then serves; without merges it cannot change the
    # ids.
    return _byte_level(tokenizer, ByteLevel(add_prefix_space=False, use_regex=True))


def train_bpe(texts: Iterable[str], size: int) -> Tokenizer:
    """A byte-level BPE with exactly `size` tokens, the same for the same texts: every text has a
    spelling in it.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=True)
    alphabet = sorted(ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=size - 1, initial_alphabet=alphabet, special_tokens=[], show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    reached = tokenizer.get_vocab_size() + 1
    if reached != size:
        raise AmorError(
            f"the text is too small for bpe:{size}, it yields {reached} tokens; use "
            f"bpe:{reached} or less, or more text"
        )
    return _byte_level(tokenizer, tokenizer.pre_tokenizer)


def _byte_level(tokenizer: Tokenizer, cut: pre_tokenizers.PreTokenizer) -> Tokenizer:
    tokenizer.pre_tokenizer = cut
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END_OF_TEXT, special=True, normalized=False)])
    return tokenizer


def canonical(tokenizer: Tokenizer) -> str:
    """tokenizer.json without what changes no id: truncation, padding, key order, white space."""
    tree = {**json.loads(tokenizer.to_str()), "truncation": None, "padding": None}
    return json.dumps(tree, sort_keys=True, ensure_ascii=False)


def tokenizer_hash(tokenizer: Tokenizer) -> str:
    """sha256 of the canonical form, in hex."""
    return hashlib.sha256(canonical(tokenizer).encode()).hexdigest()


def find_end_of_text(tokenizer: Tokenizer, name: str | None = None) -> int | None:
    """The id that ends a document: of the named token, or of the first of ENDS that exists."""
    ids = map(tokenizer.token_to_id, ENDS if name is None else (name,))
    return next((token for token in ids if token is not None), None)


def end_of_text(tokenizer: Tokenizer, name: str | None = None) -> int:
    """The id that ends a document, as `find_end_of_text`; an error where there is none."""
    token = find_end_of_text(tokenizer, name)
    if token is not None:
        return token
    missing = "a token for the end of a text" if name is None else f"a token {name!r}"
    hint = "`amor prepare --end-of-text TOKEN` names one"
    raise AmorError(f"the tokenizer does not have {missing}; {hint}: {special_tokens(tokenizer)}")


def special_tokens(tokenizer: Tokenizer) -> str:
    """The special tokens with their ids, at most 20, for an error message."""
    special = [(i, t) for i, t in tokenizer.get_added_tokens_decoder().items() if t.special]
    names = ", ".join(f"{token.content!r} ({token_id})" for token_id, token in special[:20])
    return f"special tokens: {names or 'none'}"
