"""Perplexity against length: one pass over a long segment gives a point of the curve for every
length.

Lengths are nested: the prefixes of one segment. A recurrent state or a KV cache goes on from piece
to piece, so the loss of a token is that of a text cut right behind it, and a pass over the longest
prefix holds all shorter ones. Two numbers per length: the perplexity of the whole prefix, which is
what is commonly plotted, and that of the last tokens before it (the bucket), which shows a break
that the mean over the prefix dilutes.
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
from amor.data.tokenizer import end_of_text
from amor.errors import AmorError
from amor.eval.perplexity import MOST, each_output
from amor.gates.base import Gate
from amor.judge.loop import CHUNK, ignore_tokens
from amor.judge.windows import check_tokens, encoder
from amor.models.amor import Amor
from amor.numbers import perplexity
from amor.records import Number, Record
from amor.records.evals import GateCounts, LengthCurve
from amor.vocabulary import prefix_ids

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from amor.data.encoder import Encoder

LENGTHS = (3072, *range(4096, 20481, 2048))  # tokens, as in the paper
SEGMENTS = 50  # per set
BUCKET = 1024  # tokens before a length whose perplexity is measured apart
LOOK = 20  # times the tokens needed are searched for documents that are long enough
CHARACTERS = 1 << 16  # of a document encoded at a time


@dataclass(frozen=True)
class Span:
    """The tokens of one segment, and the number of documents in it."""

    ids: np.ndarray  # [longest length + 1]
    documents: int


class Segment(Record, frozen=True):
    """The losses of one segment at every length; small enough to be stored."""

    lengths: tuple[typed.Positive, ...]
    prefix: tuple[Number, ...]  # nats per token over the first tokens up to each length
    bucket: tuple[Number, ...]  # nats per token over the last BUCKET tokens before it
    rates: tuple[tuple[typed.Share, ...], ...]  # of those that fired, per block
    documents: typed.Positive  # more than 1: short ones, joined
    gates: GateCounts  # of the whole segment


def each_segment(
    model: Amor,
    chosen: Iterable[Span],
    *,
    lengths: Sequence[int] = LENGTHS,
    gates: Sequence[Gate] | None = None,  # one per block; None: the model's own
    chunk: int = CHUNK,  # columns per forward call
    bucket: int = BUCKET,
    on_tokens: Callable[[int], None] = ignore_tokens,  # called with the number of tokens read
) -> Iterator[Segment]:
    """The segment of each span; its bits do not depend on the other spans."""
    last = [slice(max(length - bucket, 0), length) for length in lengths]
    for span in chosen:
        check_tokens(int(span.ids.max()), model.config.vocab)
        window = loader.cut(torch.from_numpy(span.ids[None, : lengths[-1] + 1]))
        ((output, counts),) = each_output(
            model, window, columns=chunk, gates=gates, on_tokens=on_tokens
        )
        nll, fire = output.nll[0].double(), output.fire[:, 0].double()
        yield Segment(
            lengths=tuple(lengths),
            prefix=tuple(float(nll[:length].mean()) for length in lengths),
            bucket=tuple(float(nll[here].mean()) for here in last),
            rates=tuple(tuple(fire[:, here].mean(1).tolist()) for here in last),
            documents=span.documents,
            gates=counts,
        )


def curve(segments: Sequence[Segment]) -> LengthCurve:
    """The curve of several segments: exp of the mean loss over segments, as in the papers it is
    compared with.

    Errors are those of the mean loss times the perplexity (the slope of exp); 0 for one segment, as
    in the harness's tables.
    """
    if not segments:
        raise AmorError("a curve of no segments; give at least one")
    lengths = segments[0].lengths
    if other := next((one.lengths for one in segments if one.lengths != lengths), None):
        curves = f"segments of lengths {lengths} and {other} are of two curves"
        raise AmorError(f"{curves}; judge the older ones again")
    losses = list(zip(*(one.prefix for one in segments), strict=True))  # by length
    prefix = [min(perplexity(fmean(each)), MOST) for each in losses]
    many = len(segments) > 1
    errors = [stdev(each) / math.sqrt(len(each)) if many else 0.0 for each in losses]
    rates = [
        tuple(fmean(block) for block in zip(*here, strict=True))
        for here in zip(*(one.rates for one in segments), strict=True)
    ]
    return LengthCurve(
        lengths=lengths,
        segments=len(segments),
        prefix=tuple(prefix),
        bucket=tuple(
            min(perplexity(fmean(each)), MOST) for each in zip(*(one.bucket for one in segments))
        ),
        errors=tuple(min(value * error, MOST) for value, error in zip(prefix, errors)),
        rates=tuple(rates) if rates[0] else (),
    )


def spans(
    tokenizer: Tokenizer,
    texts: Iterable[str],
    lengths: Sequence[int] = LENGTHS,
    count: int = SEGMENTS,
    source: str = "the text",  # what errors call it
    add_bos: bool | None = None,  # each document stands behind prefix_ids(tokenizer, add_bos)
) -> list[Span]:
    """The beginnings of documents that are long enough; where those are too few, short ones joined
    as in training.

    One segment per document: two of one book are not two samples. The search in an endless stream
    ends after LOOK times the tokens that are needed.
    """
    if not lengths or lengths[0] < 1 or any(a >= b for a, b in pairwise(lengths)):
        named = ", ".join(map(str, lengths)) or "none"
        advice = "give numbers of tokens, each larger than the one before"
        raise AmorError(f"lengths {named}: {advice}")
    if count < 1:
        raise AmorError(f"segments {count}: give at least 1")
    wanted = lengths[-1] + 1
    encode, joiner = encoder(tokenizer), Joiner(tokenizer, wanted)
    prefix = np.array(prefix_ids(tokenizer, add_bos), dtype=np.int64)
    whole: list[Span] = []
    looked = 0
    for text in texts:
        ids = beginning(encode, text, wanted)
        looked += len(ids)
        ids = np.concatenate([prefix, ids])[:wanted] if len(ids) else ids
        if len(ids) == wanted:
            whole.append(Span(ids, 1))
        elif len(ids) and len(joiner.spans) < count:
            joiner.add(ids)
        if len(whole) == count or looked > LOOK * count * wanted:
            break
    chosen = (whole + joiner.spans)[:count]
    if not chosen:
        lack = f"{source} holds {looked:,} tokens, less than one segment of {wanted:,}"
        raise AmorError(f"{lack}; give more or shorter lengths")
    return chosen


def beginning(encode: Encoder, text: str, wanted: int) -> np.ndarray:
    """At most the first `wanted` tokens of a document; the rest of a book is not encoded."""
    parts: list[np.ndarray] = []
    for part in encode.pieces(text, CHARACTERS):
        if sum(map(len, parts)) >= wanted:
            break
        parts.append(encode(part))
    return np.concatenate(parts)[:wanted].astype(np.int64)


class Joiner:
    """Short documents joined, each closed by the end-of-text token, and cut into segments."""

    def __init__(self, tokenizer: Tokenizer, wanted: int) -> None:
        self.end, self.wanted = end_of_text(tokenizer), wanted
        self.spans: list[Span] = []
        self.waiting, self.documents = np.empty(0, dtype=np.int64), 0

    def add(self, ids: np.ndarray) -> None:
        """Add a document of fewer tokens than a segment; at most one segment becomes full."""
        self.waiting = np.concatenate([self.waiting, ids, [self.end]])
        self.documents += 1
        if len(self.waiting) >= self.wanted:
            self.spans.append(Span(self.waiting[: self.wanted], self.documents))
            self.waiting = self.waiting[self.wanted :]
            self.documents = int(len(self.waiting) > 0)
