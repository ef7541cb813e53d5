"""Text cut into windows: evenly spaced ones, the same every time, or rows of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from amor.data.encoder import Encoder
from amor.data.loader import BatchSource, Windows, cut
from amor.data.shards import Shards, dtype_for
from amor.data.tokenizer import tokenizer_hash
from amor.errors import AmorError
from amor.ops.head import IGNORE
from amor.records.value import TextSource
from amor.vocabulary import prefix_ids, vocabulary

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def of_shards(
    folder: str | Path,
    context: int,  # tokens per window
    count: int,  # windows at most
    tokenizer: Tokenizer | None,  # of the model; None: not compared with that of the shards
    vocab: int,
    apart: bool,  # whether the state is reset where a document begins
) -> Windows:
    """Evenly spaced windows [n, context] of prepared tokens that fit vocabulary and tokenizer."""
    shards = Shards.open(folder)
    shards.check(vocab, None if tokenizer is None else tokenizer_hash(tokenizer))
    starts = spaced(shards.tokens, context, count, str(folder))
    tokens = torch.from_numpy(np.stack([shards.read(int(start), context + 1) for start in starts]))
    return replace(cut(tokens, shards.end_of_text if apart else None), source=str(folder))


def of_ids(ids: np.ndarray, context: int, count: int, source: str) -> Windows:
    """Evenly spaced windows [n, context] of a text of token ids."""
    starts = spaced(len(ids), context, count, source)
    tokens = np.stack([ids[start : start + context + 1] for start in starts]).astype(np.int64)
    return replace(cut(torch.from_numpy(tokens)), source=source)


def of_text(ids: Sequence[int]) -> Windows:
    """A whole text as one window [1, T]; the last token has no target."""
    return cut(torch.tensor([[*ids, IGNORE]]))


@dataclass(frozen=True)
class BatchWindows:
    """Rows first .. last - 1 of the first batch of a source, read from disk when indexed."""

    source: BatchSource
    first: int  # row of the batch
    last: int  # one past the last row
    end_of_text: int | None = None  # given: the state is reset at every document

    def __len__(self) -> int:
        return self.last - self.first

    def __getitem__(self, rows: slice) -> Windows:
        start, stop, _ = rows.indices(len(self))
        return self.source.text(0, self.first + start, self.first + stop, self.end_of_text)


def about(windows: Windows) -> TextSource:
    """The text of a measurement as results describe it."""
    return TextSource(
        source=windows.source,
        windows=len(windows),
        context=windows.columns,
        tokens=windows.tokens.numel(),
        documents="joined" if windows.reset is None else "apart",
    )


def encode(tokenizer: Tokenizer, text: str, add_bos: bool | None = None) -> np.ndarray:
    """Token ids of a text in which names of special tokens are plain text, behind the ids of
    `amor.vocabulary.prefix_ids(tokenizer, add_bos)`."""
    return np.concatenate([prefix_ids(tokenizer, add_bos), encoder(tokenizer)(text)]).astype(int)


def encoder(tokenizer: Tokenizer) -> Encoder:
    """An encoder for many texts, which caches the tokens of words."""
    return Encoder(tokenizer, dtype_for(vocabulary(tokenizer)))


def spaced(tokens: int, context: int, count: int, source: str) -> np.ndarray:
    """First tokens of at most `count` windows, evenly spaced and without overlap."""
    if context < 1 or count < 2:
        least = "at least 1 and 2 are needed (errors come from the windows)"
        raise AmorError(f"context {context} and windows {count}: {least}")
    fit = (tokens - 1) // context
    if fit < 2:
        lack = f"{source} holds {tokens:,} tokens, less than two windows of {context:,}"
        raise AmorError(f"{lack}; give more text or a shorter --context")
    places = np.linspace(0, fit - 1, min(count, fit)).astype(np.int64)
    return places * context


def check_tokens(largest: int, vocab: int, source: str = "the text") -> None:
    """An error where a text has a token that the model does not have."""
    if largest >= vocab:
        raise AmorError(
            f"token {largest} of {source} is not in the model's vocabulary of {vocab:,}"
        )
