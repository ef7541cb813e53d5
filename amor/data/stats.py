"""What a model must beat: guessing every token by its frequency in the training text."""

import math

import numpy as np

from amor.data.shards import Shards


def counts(shards: Shards) -> np.ndarray:
    """How often each id occurs, int64 [vocab]."""
    total = np.zeros(shards.vocab, dtype=np.int64)
    for piece in shards.pieces():
        total += np.bincount(piece, minlength=shards.vocab)
    return total


def unigram_entropy(train: Shards, valid: Shards) -> float:
    """Mean nats per token of `valid` under the token frequencies of `train`."""
    train.check(tokenizer_hash=valid.tokenizer_hash)
    return unigram_nll(counts(train), counts(valid))


def unigram_nll(train: np.ndarray, valid: np.ndarray) -> float:
    """Mean nats per token of a text with counts `valid` under the frequencies of counts `train`,
    with add-one smoothing.
    """
    smoothed = train + 1
    return float((valid * (math.log(smoothed.sum()) - np.log(smoothed))).sum() / valid.sum())
