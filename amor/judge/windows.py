"""Held-out text cut into windows: the same ones every time, spread evenly over what there is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from amor.data.loader import document_starts
from amor.data.shards import Shards, dtype_for
from amor.data.tokenizer import tokenizer_hash
from amor.errors import AmorError

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True)
class Windows:
    tokens: Tensor  # [n, T]
    targets: Tensor  # [n, T] one further
    reset: Tensor | None  # [n, T] true where a document begins; None: documents run on
    source: str

    def about(self) -> dict[str, Any]:
        rows, columns = self.tokens.shape
        documents = "joined" if self.reset is None else "apart"
        found = {"source": self.source, "windows": rows, "context": columns, "tokens": rows * columns}
        return found | {"documents": documents}


def of_shards(folder: str | Path, context: int, count: int, tokenizer: Tokenizer | None, vocab: int, apart: bool) -> Windows:
    shards = Shards.open(folder)
    shards.check(vocab, None if tokenizer is None else tokenizer_hash(tokenizer))
    starts = spaced(shards.tokens, context, count, str(folder))
    held = torch.from_numpy(np.stack([shards.read(int(start), context + 1) for start in starts]))
    tokens = held[:, :-1].contiguous()
    reset = document_starts(tokens, shards.end_of_text) if apart else None
    return Windows(tokens, held[:, 1:].contiguous(), reset, str(folder))


def of_ids(ids: np.ndarray, context: int, count: int, source: str) -> Windows:
    starts = spaced(len(ids), context, count, source)
    held = torch.from_numpy(np.stack([ids[start : start + context + 1] for start in starts]).astype(np.int64))
    return Windows(held[:, :-1].contiguous(), held[:, 1:].contiguous(), None, source)


def encode(tokenizer: Tokenizer, text: str) -> np.ndarray:
    """A text as training saw it: the words of special tokens are plain text, and nothing is added."""
    from amor.data.encoder import Encoder
    from amor.data.tokenizer import vocabulary

    return Encoder(tokenizer, dtype_for(vocabulary(tokenizer)))(text)


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
