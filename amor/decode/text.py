"""Streaming detokenization: no half characters, nothing of a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import TYPE_CHECKING

from amor.data.spelling import Speller

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class Detokenizer:
    """Turns tokens into text as soon as it is final; special tokens have no text."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer, self.speller = tokenizer, Speller(tokenizer)
        if self.speller.byte:
            self.decoder = codecs.getincrementaldecoder("utf-8")("replace")
        else:
            from tokenizers.decoders import DecodeStream

            self.stream = DecodeStream(skip_special_tokens=True)

    def add(self, token: int) -> str:
        """The text that this token completes."""
        if token in self.speller.special or self.tokenizer.id_to_token(token) is None:
            return ""
        if not self.speller.byte:
            return self.stream.step(self.tokenizer, token) or ""
        return self.decoder.decode(
            self.speller(token, "surrogateescape").encode("utf-8", "surrogateescape")
        )

    def flush(self) -> str:
        """The rest at the end: an incomplete character."""
        return self.decoder.decode(b"", True) if self.speller.byte else ""


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
