"""From tokens back to text as they come: no half characters, nothing of a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import TYPE_CHECKING

from amor.data.spelling import Speller

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class Detokenizer:
    """Gives the text of tokens as soon as it cannot change any more; special tokens spell nothing."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer, self.speller = tokenizer, Speller(tokenizer)
        if self.speller.byte:
            self.decoder = codecs.getincrementaldecoder("utf-8")("replace")
        else:
            from tokenizers.decoders import DecodeStream

            self.stream = DecodeStream(skip_special_tokens=True)

    def add(self, token: int) -> str:
        if token in self.speller.special or self.tokenizer.id_to_token(token) is None:
            return ""
        if not self.speller.byte:
            return self.stream.step(self.tokenizer, token) or ""
        return self.decoder.decode(self.speller(token, "surrogateescape").encode("utf-8", "surrogateescape"))

    def flush(self) -> str:
        """What is left at the end: a character that was not finished."""
        return self.decoder.decode(b"", True) if self.speller.byte else ""


class Stopper:
    """Text on its way out, held back while it may be the beginning of a stop string."""

    def __init__(self, stops: Sequence[str]):
        self.stops, self.held, self.stopped = [s for s in stops if s], "", False

    def add(self, text: str) -> str:
        """The text that may be shown now; `stopped` once a stop string is complete, which is not shown."""
        self.held += text
        found = [at for at in (self.held.find(stop) for stop in self.stops) if at >= 0]
        if found:
            shown, self.held, self.stopped = self.held[: min(found)], "", True
            return shown
        keep = max((_overlap(self.held, stop) for stop in self.stops), default=0)
        shown, self.held = self.held[: len(self.held) - keep], self.held[len(self.held) - keep :]
        return shown

    def flush(self) -> str:
        shown, self.held = self.held, ""
        return shown


def _overlap(text: str, stop: str) -> int:
    """How much of the end of the text is the beginning of the stop string."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
