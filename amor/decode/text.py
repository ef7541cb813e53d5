"""Streaming detokenization: no half characters, nothing of a stop string."""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from amor.data.spelling import Speller

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BYTE = re.compile(r"<0x([0-9A-F]{2})>")  # the name of a byte in a tokenizer with byte fallback
LONGEST_CHARACTER = 4  # bytes in UTF-8, each of which may be a token


class Detokenizer:
    """Turns tokens into text as soon as it is final; special tokens have no text."""

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int] = ()):
        """before: the tokens of the prompt. Many tokenizers leave out the space that begins the
        first word of a text, and the first word after a prompt is not that."""
        self.tokenizer, self.speller = tokenizer, Speller(tokenizer)
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.last = [token for token in before if token not in self.speller.special][-1:]
        self.pending: list[int] = []  # tokens after the last one that may be part of a character

    def add(self, token: int) -> str:
        """The text that this token completes."""
        name = self.tokenizer.id_to_token(token)
        if token in self.speller.special or name is None:
            return ""
        if self.speller.byte:
            letters = self.speller(token, "surrogateescape")
            return self.decoder.decode(letters.encode("utf-8", "surrogateescape"))
        byte = BYTE.fullmatch(name)
        if byte and self.tokenizer.decode([token]) != name:  # a byte, not a word of that name
            rest, self.last = self._decode_pending(), [token]
            return rest + self.decoder.decode(bytes.fromhex(byte[1]))
        rest = self.decoder.decode(b"", True)
        self.pending.append(token)
        more = len(self.pending) < LONGEST_CHARACTER
        if more and self.tokenizer.decode([*self.last, *self.pending]).endswith("\ufffd"):
            return rest
        return rest + self._decode_pending()

    def flush(self) -> str:
        """The rest at the end: an incomplete character."""
        return self._decode_pending() + self.decoder.decode(b"", True)

    def _decode_pending(self) -> str:
        """The text of the pending tokens; the last token before them decides on a space."""
        tokens = [*self.last, *self.pending]
        before, after = self.tokenizer.decode(self.last), self.tokenizer.decode(tokens)
        self.last, self.pending = tokens[-1:], []
        return after[len(before) :]


class Stopper:
    """Withholds text while it may be the beginning of a stop string."""

    def __init__(self, stops: Sequence[str]):
        self.stops, self.pending, self.stopped = [s for s in stops if s], "", False

    def add(self, text: str) -> str:
        """The text that is final now; sets `stopped` at a stop string, which is left out."""
        self.pending += text
        ends = [at for at in (self.pending.find(stop) for stop in self.stops) if at >= 0]
        if ends:
            final, self.pending, self.stopped = self.pending[: min(ends)], "", True
            return final
        keep = max((_overlap(self.pending, stop) for stop in self.stops), default=0)
        cut = len(self.pending) - keep
        final, self.pending = self.pending[:cut], self.pending[cut:]
        return final

    def flush(self) -> str:
        """The text withheld so far."""
        final, self.pending = self.pending, ""
        return final


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of the text that begins the stop string."""
    return next(
        (n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0
    )
