"""Perplexity against length: one pass over a long segment gives a point of the curve for every length.

Lengths are nested: the prefixes of one segment. A recurrent state or a KV cache goes on from piece to piece, so the loss of a
token is that of a text cut right behind it, and a pass over the longest prefix holds all shorter ones. Two numbers a length: the
perplexity of the whole prefix, which is what is commonly plotted, and that of the last tokens before it (the bucket), which
shows a break that the mean over the prefix dilutes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, stdev
from typing import TYPE_CHECKING

import numpy as np
import torch

from amor import typed
from amor.data import loader
from amor.errors import AmorError
from amor.eval.score import batch_invariant, count_gates
from amor.gates.base import Gate
from amor.judge.gates import own_gates
from amor.judge.loop import CHUNK, ignore_tokens, join_chunks, run_windows
from amor.judge.windows import encoder
from amor.models.amor import Amor, Output
from amor.numbers import perplexity
from amor.records import Number, Record
from amor.records.evals import GateCounts, LengthCurve

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from amor.data.encoder import Encoder

LENGTHS = (3072, *range(4096, 20481, 2048))
SEGMENTS = 50  # of a set
BUCKET = 1024  # tokens before a length
LOOK = 20  # times the tokens needed are looked through for documents that are long enough
CHARACTERS = 1 << 16  # of a document encoded at a time
MOST = 1e100  # the largest number a file of results holds


@dataclass(frozen=True)
class Span:
    """The tokens of one segment, and how many documents they are of."""

    ids: np.ndarray  # [longest length + 1]
    documents: int


class Segment(Record, frozen=True):
    """What a model said of one segment: all that a curve needs of it, small enough to be kept by whoever may be stopped."""

    lengths: tuple[typed.Positive, ...]
    prefix: tuple[Number, ...]  # nats a token, over the first tokens up to each length
    bucket: tuple[Number, ...]  # over the last ones before it
    rates: tuple[tuple[typed.Share, ...], ...]  # of those last ones, how many fired, a block
    documents: typed.Positive  # more than 1: short ones, joined
    gates: GateCounts  # of the whole segment


def each_segment(
    model: Amor,
    chosen: Iterable[Span],
    *,
    lengths: Sequence[int] = LENGTHS,
    gates: Sequence[Gate] | None = None,
    chunk: int = CHUNK,  # columns per forward call
    bucket: int = BUCKET,
    forward: Callable[..., Output] | None = None,  # what is called in the model's place
    on_tokens: Callable[[int], None] = ignore_tokens,  # called with the number of tokens read
) -> Iterator[Segment]:
    """One after another, each by itself to the bit: whoever keeps what was found asks for the others alone, in any order."""
    thresholds = [float(gate.threshold) for gate in (own_gates(model) if gates is None else gates)]
    for span in chosen:
        if (worst := int(span.ids.max())) >= model.config.vocab:
            raise AmorError(f"token {worst} of the text is not in the model's vocabulary of {model.config.vocab:,}")
        window = loader.cut(torch.from_numpy(span.ids[None, : lengths[-1] + 1]))
        chunks = run_windows(
            model,
            window,
            rows=1,
            columns=chunk,
            gates=gates,
            compute="true_sparse",
            forward=batch_invariant(forward or model),
            on_tokens=on_tokens,
        )
        found = join_chunks(chunks)
        if not bool(torch.isfinite(found.nll).all()):
            raise AmorError(f"{model.config.name} gives losses that are not finite on this text; its weights are broken")
        nll, fire = found.nll[0].double(), found.fire[:, 0].double()
        last = [slice(max(length - bucket, 0), length) for length in lengths]
        yield Segment(
            lengths=tuple(lengths),
            prefix=tuple(float(nll[:length].mean()) for length in lengths),
            bucket=tuple(float(nll[here].mean()) for here in last),
            rates=tuple(tuple(fire[:, here].mean(1).tolist()) for here in last),
            documents=span.documents,
            gates=count_gates(found.fire, found.score, torch.ones_like(found.nll, dtype=torch.bool), thresholds)[0],
        )


def curve(segments: Sequence[Segment]) -> LengthCurve:
    """Segments folded: losses are averaged over segments and then raised, as in the papers this is compared with."""
    if not segments:
        raise AmorError("a curve of no segments; give at least one")
    lengths = segments[0].lengths
    if other := next((one.lengths for one in segments if one.lengths != lengths), None):
        raise AmorError(f"segments of lengths {lengths} and {other} are of two curves; judge the older ones again")
    rates = [[fmean(block) for block in zip(*here)] for here in zip(*(one.rates for one in segments))]
    return LengthCurve(
        lengths=lengths,
        segments=len(segments),
        prefix=tuple(raised([one.prefix[i] for one in segments])[0] for i in range(len(lengths))),
        bucket=tuple(raised([one.bucket[i] for one in segments])[0] for i in range(len(lengths))),
        errors=tuple(raised([one.prefix[i] for one in segments])[1] for i in range(len(lengths))),
        rates=tuple(tuple(here) for here in rates) if rates[0] else (),
    )


def raised(losses: Sequence[float]) -> tuple[float, float]:
    """The perplexity of mean losses, and its standard error: that of their mean times the perplexity (the slope of exp).

    One segment has no spread to tell an error by; it is written as 0, as the harness's tables do."""
    found = min(perplexity(fmean(losses)), MOST)
    error = stdev(losses) / math.sqrt(len(losses)) if len(losses) > 1 else 0.0
    return found, min(found * error, MOST)


def spans(
    tokenizer: Tokenizer,
    texts: Iterable[str],
    lengths: Sequence[int] = LENGTHS,
    count: int = SEGMENTS,
    source: str = "the text",  # what errors call it
) -> list[Span]:
    """The beginnings of documents that are long enough; where those are too few, short ones joined as in training.

    A segment a document: two of one book are not two samples. Whoever streams an endless set does not wait for ever: past LOOK
    times the tokens that are needed, what was found must do.
    """
    if not lengths or lengths[0] < 1 or any(a >= b for a, b in pairwise(lengths)):
        raise AmorError(
            f"lengths {', '.join(map(str, lengths)) or 'none'}: give numbers of tokens, each larger than the one before"
        )
    if count < 1:
        raise AmorError(f"segments {count}: give at least 1")
    spelled, joiner, wanted = (
        encoder(tokenizer),
        Joiner(tokenizer, lengths[-1] + 1),
        lengths[-1] + 1,
    )
    whole: list[Span] = []
    looked = 0
    for text in texts:
        ids = beginning(spelled, text, wanted)
        looked += len(ids)
        if len(ids) == wanted:
            whole.append(Span(ids, 1))
        elif len(ids) and len(joiner.found) < count:
            joiner.add(ids)
        if len(whole) == count or looked > LOOK * count * wanted:
            break
    found = (whole + joiner.found)[:count]
    if not found:
        raise AmorError(f"{source} holds {looked:,} tokens, less than one segment of {wanted:,}; give more or shorter lengths")
    return found


def beginning(spelled: Encoder, text: str, wanted: int) -> np.ndarray:
    """The first tokens of a document, all where there are fewer; the rest of a book is not encoded."""
    parts: list[np.ndarray] = []
    for part in spelled.pieces(text, CHARACTERS):
        if sum(map(len, parts)) >= wanted:
            break
        parts.append(spelled(part))
    return np.concatenate(parts)[:wanted].astype(np.int64)


class Joiner:
    """Short documents one behind another, each closed by the end-of-text token, cut into segments."""

    def __init__(self, tokenizer: Tokenizer, wanted: int) -> None:
        from amor.data.tokenizer import end_of_text

        self.end, self.wanted = end_of_text(tokenizer), wanted
        self.found: list[Span] = []
        self.waiting, self.documents = np.empty(0, dtype=np.int64), 0

    def add(self, ids: np.ndarray) -> None:
        """Fewer tokens than a segment has, so at most one becomes full."""
        self.waiting = np.concatenate([self.waiting, ids, [self.end]])
        self.documents += 1
        if len(self.waiting) >= self.wanted:
            self.found.append(Span(self.waiting[: self.wanted], self.documents))
            self.waiting = self.waiting[self.wanted :]
            self.documents = int(len(self.waiting) > 0)
