"""What a token spells, and what sort of token it is: the words of a trace and the classes of its
summary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from amor.data.tokenizer import byte_letters

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# every token is of one kind; `rare` cuts across them
KINDS = ("first in word", "continuation", "digit", "punctuation", "whitespace", "special")
LEARNED = (
    1000  # a vocabulary of at least this many tokens was learned by merging, the common ones first
)
SHARE = 0.1  # of a text that the rarest tokens of a small vocabulary make up


class Speller:
    """Text of a token id; bytes that are no character by themselves are decoded with `errors`."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self.special = {i for i, token in added.items() if token.special}
        self.byte: dict[str, int] = {}  # of a letter, if tokens are spelled in bytes
        if "ByteLevel" in type(tokenizer.decoder).__name__:
            self.byte = {letter: byte for byte, letter in byte_letters().items()}

    def __call__(self, token: int, errors: str = "backslashreplace") -> str:
        spelled = self.tokenizer.id_to_token(token)
        if spelled is None:
            return f"<{token}>"  # a model may have more rows than the tokenizer has tokens
        if token in self.special:
            return spelled
        if self.byte and all(letter in self.byte for letter in spelled):
            return bytes(self.byte[letter] for letter in spelled).decode("utf-8", errors)
        return self.tokenizer.decode([token], skip_special_tokens=False)


def kinds(ids: Sequence[int], speller: Speller) -> list[str]:
    """The kind of every token of a text, in the order of the text."""
    result, before = [], " "
    for token in ids:
        # part of a character that takes several tokens: most of those are letters
        text = speller(token, "replace").replace("\ufffd", "a")
        special = token in speller.special
        result.append("special" if special else kind(text, before))
        before = " " if special else text or before
    return result


def kind(text: str, before: str) -> str:
    """The kind of a token that spells `text` after a token that spells `before`."""
    core = text.strip()
    if not core:
        return "whitespace"
    if core.isnumeric():
        return "digit"
    if not any(letter.isalnum() for letter in core):
        return "punctuation"
    inside = text[0].isalnum() and (before[-1].isalnum() or before[-1] in "'’")
    return "continuation" if inside else "first in word"


def rare(ids: Sequence[int], vocab: int) -> list[bool]:
    """Rare tokens: the later half of a learned vocabulary; of a small one the rarest of this text,
    a tenth of it at most.
    """
    if vocab >= LEARNED:
        return [token >= vocab // 2 for token in ids]
    budget, chosen = SHARE * len(ids), set()
    for token, count in sorted(Counter(ids).items(), key=lambda item: (item[1], item[0])):
        budget -= count
        if budget < 0:
            break
        chosen.add(token)
    return [token in chosen for token in ids]
