"""Text -> ids: a tokenizer asked once a word, with the words of special tokens read as plain text,
and nothing added.

A byte-level tokenizer cuts text into words before it looks anything up, so words that are known
need not be spelled again. Most of a text is words seen before: on English books this was measured
at 2 (first 7 MB) to 4 times (all words known) the speed of the tokenizer on whole texts.
"""

from __future__ import annotations

import re

import numpy as np
from tokenizers import Tokenizer

from amor.errors import AmorError

# Before a space with a visible character on its left and a letter on its right. Every byte-level
# pattern in use begins a word
# there, whatever stands around it, so the two sides can be encoded apart; __init__ asks the
# tokenizer whether it does.
CUT = re.compile(r"(?<=\S)(?= [A-Za-z])")
KEPT = 1 << 18  # words remembered, a bound on memory
LONG = 64  # characters of the longest word remembered


class Encoder:
    """Gives the same ids as `tokenizer.encode(text, add_special_tokens=False)` with special tokens
    switched off.

    The tokenizer is the encoder's from then on: a copy of Llama's would cost seconds.
    """

    def __init__(self, tokenizer: Tokenizer, dtype: str) -> None:
        self.tokenizer = tokenizer
        self.tokenizer.encode_special_tokens = True
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.dtype = dtype
        self.may_cut = _begins_words_at_spaces(tokenizer)
        self._known: dict[str, bytes] = {}

    def __call__(self, text: str) -> np.ndarray:
        if not self.may_cut:
            return np.frombuffer(self._spelled([text])[0], dtype=self.dtype)
        words = CUT.split(text)
        fresh = [word for word in dict.fromkeys(words) if word not in self._known]
        self._known.update(zip(fresh, self._spelled(fresh)))
        ids = b"".join(map(self._known.__getitem__, words))
        if len(self._known) > KEPT:
            self._known.clear()
        for word in fresh:
            if len(word) > LONG:
                self._known.pop(word, None)
        return np.frombuffer(ids, dtype=self.dtype)

    def _spelled(self, texts: list[str]) -> list[bytes]:
        try:
            found = self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        except Exception as error:
            if (
                type(error) is not Exception
            ):  # which is what the library raises where a text has no spelling
                raise
            raise AmorError(
                f"the tokenizer has no spelling for this text ({error}); use another tokenizer"
            ) from error
        return [np.array(encoding.ids, dtype=self.dtype).tobytes() for encoding in found]

    def pieces(self, text: str, size: int) -> list[str]:
        """A long text in pieces of about `size` characters that are encoded one by one to the same
        ids as the whole.
        """
        found, start = [], 0
        while self.may_cut and len(text) - start > size:
            cut = CUT.search(text, start + size)
            if cut is None:
                break
            found.append(text[start : cut.start()])
            start = cut.start()
        return [*found, text[start:]]


def _begins_words_at_spaces(tokenizer: Tokenizer) -> bool:
    """Whether the tokenizer changes no text before it cuts it, works on bytes, and cuts at the
    places of CUT.
    """
    if (
        tokenizer.normalizer is not None
        or tokenizer.pre_tokenizer is None
        or "ByteLevel" not in str(tokenizer.pre_tokenizer)
    ):
        return False
    text = "one two, three. Four! 5 six) seven\u2019 eight"
    begins = {start for _, (start, _) in tokenizer.pre_tokenizer.pre_tokenize_str(text)}
    return {cut.start() for cut in CUT.finditer(text)} <= begins
