"""Perplexity of held-out text: per token, and bits per byte, which compare across tokenizers;
errors over windows.

The text is prepared tokens (a folder of `amor prepare`: its valid split) or a file of documents,
which are then encoded as `amor prepare` would. Windows are spread over it, none over another, and
every one is read from its beginning.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from amor import typed
from amor.data.loader import Windows
from amor.data.shards import Shards, sha256_of
from amor.data.sources import Reading, find_sources
from amor.data.spelling import Speller
from amor.errors import AmorError
from amor.eval.lengths import MOST
from amor.eval.score import batch_invariant, count_gates
from amor.gates.base import Gate
from amor.judge import windows as judged
from amor.judge.gates import own_gates
from amor.judge.loop import ignore_tokens, run_windows
from amor.judge.resample import ratio
from amor.models.amor import Amor, Output
from amor.numbers import perplexity
from amor.records import Number, Record
from amor.records.evals import Data, GateCounts

if TYPE_CHECKING:
    from tokenizers import Tokenizer

WINDOWS = 1000  # at most


class Window(Record, frozen=True):
    """The loss of one window; small enough to be stored."""

    nats: Number  # of all its targets
    tokens: typed.Positive
    bytes: typed.Count | None  # of the text of the targets; None where the tokenizer cannot tell
    gates: GateCounts


def held_out(
    path: str | Path,
    tokenizer: Tokenizer | None,
    vocab: int,
    context: int,
    count: int = WINDOWS,
    apart: bool = False,  # prepared tokens only: the state is reset at every document
    field: str = "text",  # of .jsonl files
) -> Windows:
    """Windows of `context` tokens of a folder of prepared tokens or of a file."""
    path = valid_of(path)
    if path.is_dir():
        return judged.of_shards(path, context, count, tokenizer, vocab, apart)
    if tokenizer is None:
        raise AmorError(
            f"{path} is text, and the model folder has no tokenizer.json; name one with --tokenizer"
        )
    from amor.data.tokenizer import end_of_text

    spelled, end = judged.encoder(tokenizer), np.array([end_of_text(tokenizer)])
    documents = (
        document.text
        for source in find_sources([str(path)], Reading(field=field))
        for document in source.documents()
    )
    ids = np.concatenate(
        [
            np.empty(0, dtype=np.int64),
            *(part for text in documents for part in (spelled(text), end)),
        ]
    )
    if (worst := int(ids.max(initial=0))) >= vocab:
        raise AmorError(f"token {worst} of {path} is not in the model's vocabulary of {vocab:,}")
    return judged.of_ids(ids, context, count, str(path))


def valid_of(path: str | Path) -> Path:
    """Of a folder that `amor prepare` wrote the split that is held out; anything else is itself."""
    path = Path(path)
    return path / "valid" if (path / "valid").is_dir() else path


def data(path: str | Path, text: Windows) -> Data:
    """The text as results describe it."""
    path = valid_of(path)
    held = Shards.open(path).hash if path.is_dir() else sha256_of(path)
    return Data(source=str(path), sha256=held, rows=len(text))


def each_window(
    model: Amor,
    tokenizer: Tokenizer | None,  # None: bytes are not counted
    text: Windows,
    *,
    gates: Sequence[Gate] | None = None,  # one per block; None: the model's own
    forward: Callable[..., Output] | None = None,  # called instead of the model
    on_tokens: Callable[[int], None] = ignore_tokens,  # called with the number of tokens read
) -> Iterator[Window]:
    """The loss of each window, one window per forward call, so that its bits do not depend on the
    others."""
    thresholds = [float(gate.threshold) for gate in (own_gates(model) if gates is None else gates)]
    spelled = None if tokenizer is None else sizes(tokenizer, model.config.vocab)
    chunks = run_windows(
        model,
        text,
        rows=1,
        gates=gates,
        compute="true_sparse",
        forward=batch_invariant(forward or model),
        on_tokens=on_tokens,
    )
    for output in chunks:
        assert output.chunk.targets is not None
        nll, targets = output.nll.cpu(), output.chunk.targets.cpu()
        if not bool(torch.isfinite(nll).all()):
            raise AmorError(
                f"{model.config.name} gives losses that are not finite on this text; its weights "
                "are broken"
            )
        yield Window(
            nats=float(nll.double().sum()),
            tokens=targets.shape[1],
            bytes=None if spelled is None else int(spelled[targets].sum()),
            gates=count_gates(
                output.fire.cpu(),
                output.score.cpu(),
                torch.ones_like(nll, dtype=torch.bool),
                thresholds,
            )[0],
        )


def at(text: Windows, places: Sequence[int]) -> Windows:
    """Some of the windows."""
    reset = None if text.reset is None else text.reset[list(places)]
    return replace(
        text, tokens=text.tokens[list(places)], targets=text.targets[list(places)], reset=reset
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
    held = [
        0 if token in speller.special else len(speller(token, keep).encode("utf-8", keep))
        for token in range(vocab)
    ]
    return torch.tensor(held)
