"""What a model must beat: the perplexity of guessing every token by its frequency in the training
text.
"""

import math

import numpy as np

from amor.data.shards import Shards


def counts(shards: Shards) -> np.ndarray:
    """How often each id occurs, int64 [vocab]."""
    return sum(
        (np.bincount(piece, minlength=shards.vocab) for piece in shards.pieces()),
        np.zeros(shards.vocab, dtype=np.int64),
    )


def unigram_entropy(train: Shards, valid: Shards) -> float:
    """Mean nats a token of `valid` under the token frequencies of `train`."""
    train.check(tokenizer_hash=valid.tokenizer_hash)
    return unigram_nll(counts(train), counts(valid))


def unigram_nll(seen: np.ndarray, asked: np.ndarray) -> float:
    """Mean nats a token of counts `asked` under the frequencies of counts `seen`, each id counted
    once more than it was.
    """
    known = seen + 1
    return float((asked * (math.log(known.sum()) - np.log(known))).sum() / asked.sum())
