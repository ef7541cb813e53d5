"""Text cut into windows to be judged: the same ones every time, spread evenly over what there is, or as evaluation draws them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from amor.data.loader import Judging, Windows, cut
from amor.data.shards import Shards, dtype_for
from amor.data.tokenizer import tokenizer_hash
from amor.errors import AmorError
from amor.ops.head import IGNORE
from amor.records.value import TextSource

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from amor.data.encoder import Encoder


def of_shards(folder: str | Path, context: int, count: int, tokenizer: Tokenizer | None, vocab: int, apart: bool) -> Windows:
    shards = Shards.open(folder)
    shards.check(vocab, None if tokenizer is None else tokenizer_hash(tokenizer))
    starts = spaced(shards.tokens, context, count, str(folder))
    held = torch.from_numpy(np.stack([shards.read(int(start), context + 1) for start in starts]))
    return replace(cut(held, shards.end_of_text if apart else None), source=str(folder))


def of_ids(ids: np.ndarray, context: int, count: int, source: str) -> Windows:
    starts = spaced(len(ids), context, count, source)
    held = torch.from_numpy(np.stack([ids[start : start + context + 1] for start in starts]).astype(np.int64))
    return replace(cut(held), source=source)


def of_text(ids: Sequence[int]) -> Windows:
    """A whole text as one window; nothing is to be predicted after its last token."""
    return cut(torch.tensor([[*ids, IGNORE]]))


@dataclass(frozen=True)
class Drawn:
    """Rows first .. last - 1 of the first batch of a source, read when they are asked for: what evaluation judges by."""

    source: Judging
    first: int
    last: int
    end_of_text: int | None = None  # given: documents stand apart

    def __len__(self) -> int:
        return self.last - self.first

    def __getitem__(self, rows: slice) -> Windows:
        start, stop, _ = rows.indices(len(self))
        return self.source.text(0, self.first + start, self.first + stop, self.end_of_text)


def about(windows: Windows) -> TextSource:
    """What was read, for those who read the findings."""
    return TextSource(
        source=windows.source,
        windows=len(windows),
        context=windows.columns,
        tokens=windows.tokens.numel(),
        documents="joined" if windows.reset is None else "apart",
    )


def encode(tokenizer: Tokenizer, text: str) -> np.ndarray:
    """A text as training saw it: the words of special tokens are plain text, and nothing is added."""
    return encoder(tokenizer)(text)


def encoder(tokenizer: Tokenizer) -> Encoder:
    """The same for many texts: words it has met are not spelled again."""
    from amor.data.encoder import Encoder
    from amor.vocabulary import vocabulary

    return Encoder(tokenizer, dtype_for(vocabulary(tokenizer)))


def spaced(tokens: int, context: int, count: int, source: str) -> np.ndarray:
    """Where windows begin: at most `count`, none over another, spread over the text."""
    if context < 1 or count < 2:
        raise AmorError(f"context {context} and windows {count}: at least 1 and 2 are needed (errors come from the windows)")
    fit = (tokens - 1) // context
    if fit < 2:
        raise AmorError(
            f"{source} holds {tokens:,} tokens, less than two windows of {context:,}; give more text or a shorter --context"
        )
    places = np.linspace(0, fit - 1, min(count, fit)).astype(np.int64)
    return places * context
