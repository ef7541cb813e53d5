"""Perplexity of held-out text: per token, and bits per byte, which compare across tokenizers;
errors over windows.

The text is prepared tokens (a folder of `amor prepare`: its valid split) or a file of documents,
which are then encoded as `amor prepare` would. Windows are spread over it, none over another, and
every one is read from its beginning.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from amor import typed
from amor.data.loader import Windows
from amor.data.shards import Shards, sha256_of
from amor.data.sources import Reading, find_sources
from amor.data.spelling import Speller
from amor.data.tokenizer import end_of_text
from amor.errors import AmorError
from amor.eval.score import count_gates
from amor.gates.base import Gate
from amor.judge.loop import CorpusOutput, check_finite, ignore_tokens, join_chunks, run_windows
from amor.judge.resample import ratio
from amor.judge.windows import check_tokens, encoder, of_ids, of_shards
from amor.models.amor import Amor
from amor.numbers import perplexity
from amor.ops.linear import each_alone
from amor.records import Number, Record
from amor.records.evals import Data, GateCounts
from amor.vocabulary import prefix_ids

if TYPE_CHECKING:
    from tokenizers import Tokenizer

WINDOWS = 1000  # at most
MOST = 1e100  # perplexities are capped here, since JSON has no infinity


class Window(Record, frozen=True):
    """The loss of one window; small enough to be stored."""

    nats: Number  # of all its targets
    tokens: typed.Positive
    bytes: typed.Count | None  # of the text of the targets; None: not known (`sizes`)
    gates: GateCounts


def held_out(
    path: str | Path,
    tokenizer: Tokenizer,
    vocab: int,
    context: int,
    count: int = WINDOWS,
    add_bos: bool | None = None,
) -> Windows:
    """At most `count` windows of `context` tokens of a folder of prepared tokens or of a file.

    Each document of a file stands behind `prefix_ids(tokenizer, add_bos)`; prepared tokens stay as
    they are.
    """
    path = valid_of(path)
    if path.is_dir():
        return of_shards(path, context, count, tokenizer, vocab, apart=False)
    encode, end = encoder(tokenizer), np.array([end_of_text(tokenizer)])
    prefix = np.array(prefix_ids(tokenizer, add_bos), dtype=np.int64)
    parts = [np.empty(0, dtype=np.int64)]
    for source in find_sources([str(path)], Reading()):
        for document in source.documents():
            parts += [prefix, encode(document.text), end]
    ids = np.concatenate(parts)
    check_tokens(int(ids.max(initial=0)), vocab, str(path))
    return of_ids(ids, context, count, str(path))


def valid_of(path: str | Path) -> Path:
    """The held-out split of a folder that `amor prepare` wrote; anything else is itself."""
    path = Path(path)
    return path / "valid" if (path / "valid").is_dir() else path


def data(path: str | Path, windows: Windows) -> Data:
    """The text as results describe it."""
    path = valid_of(path)
    digest = Shards.open(path).hash if path.is_dir() else sha256_of(path)
    return Data(source=str(path), sha256=digest, rows=len(windows))


def each_output(
    model: Amor,
    windows: Windows,
    *,
    columns: int | None = None,  # per forward call; None: whole windows
    gates: Sequence[Gate] | None = None,  # one per block; None: the model's own
    on_tokens: Callable[[int], None] = ignore_tokens,  # called with the number of tokens read
) -> Iterator[tuple[CorpusOutput, GateCounts]]:
    """The output for each window with its gate counts; its bits do not depend on the others."""
    for row in range(len(windows)):
        with each_alone():
            chunks = run_windows(
                model,
                windows[row : row + 1],
                columns=columns,
                gates=gates,
                compute="true_sparse",
                on_tokens=on_tokens,
            )
            output = join_chunks(chunks)
        check_finite(model, output.nll)
        yield output, count_gates(output.fire, torch.ones_like(output.nll, dtype=torch.bool))[0]


def each_window(
    model: Amor,
    tokenizer: Tokenizer | None,  # None: bytes are not counted
    windows: Windows,
    *,
    gates: Sequence[Gate] | None = None,  # one per block; None: the model's own
    on_tokens: Callable[[int], None] = ignore_tokens,  # called with the number of tokens read
) -> Iterator[Window]:
    """The loss of each window."""
    lengths = None if tokenizer is None else sizes(tokenizer, model.config.vocab)
    outputs = each_output(model, windows, gates=gates, on_tokens=on_tokens)
    for (output, counts), targets in zip(outputs, windows.targets, strict=True):
        yield Window(
            nats=float(output.nll.double().sum()),
            tokens=len(targets),
            bytes=None if lengths is None else int(lengths[targets].sum()),
            gates=counts,
        )


def metrics(windows: Sequence[Window]) -> dict[str, float]:
    """Numbers as the harness names them, each with its standard error over windows."""
    if not windows:
        raise AmorError("perplexity of no windows; give at least one")
    nats = torch.tensor([one.nats for one in windows], dtype=torch.float64)
    loss, error = ratio(nats, torch.tensor([one.tokens for one in windows]))
    value = min(perplexity(loss), MOST)
    numbers = {"perplexity,none": value, "perplexity_stderr,none": min(value * error, MOST)}
    if sum(one.bytes or 0 for one in windows):
        bits, error = ratio(nats / math.log(2), torch.tensor([one.bytes or 0 for one in windows]))
        numbers |= {"bits_per_byte,none": bits, "bits_per_byte_stderr,none": error}
    return numbers


def sizes(tokenizer: Tokenizer, vocab: int) -> torch.Tensor | None:
    """[V] the bytes of text of each token; 0 for special tokens.

    None for a tokenizer that does not work on bytes: the text of its tokens depends on their
    neighbours.
    """
    speller = Speller(tokenizer)
    if not speller.byte:
        return None
    keep = "surrogateescape"  # half a character stays the bytes it is
    texts = ["" if token in speller.special else speller(token, keep) for token in range(vocab)]
    return torch.tensor([len(text.encode("utf-8", keep)) for text in texts])
