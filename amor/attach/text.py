"""Calibration: the text that thresholds are set on, and setting them.

The text is read with the backbone's own tokenizer; data of another one is refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from amor.convert.compare import TEXT
from amor.convert.opened import Opened
from amor.data.loader import Windows
from amor.data.shards import splits
from amor.errors import AmorError
from amor.gates.base import Adaptive
from amor.judge.gates import own_gates
from amor.judge.loop import join_chunks, run_windows
from amor.judge.windows import encode, of_ids, of_shards
from amor.models.amor import Amor
from amor.numbers import finite
from amor.typed import read_text

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def calibration(
    opened: Opened, data: str | None, text: str | None, context: int, count: int
) -> Windows:
    """At most `count` windows of the text that thresholds are set on: a file, or prepared data."""
    tokenizer = opened.tokenizer()
    if data:
        check_tokenizer(data, opened)
    if not text:
        assert data
        return of_shards(
            Path(data) / "train", context, count, None, opened.model.config.vocab, False
        )
    if tokenizer is None:
        raise AmorError(
            f"{opened.folder} holds no tokenizer.json to read {text} with; give prepared --data "
            "instead of --text"
        )
    ids = encode(tokenizer, read_text(Path(text)))
    if len(ids) and int(ids.max()) >= opened.model.config.vocab:
        raise AmorError(
            f"{text}: the tokenizer has tokens that the model does not, up to "
            f"{int(ids.max())}; they cannot be read"
        )
    return of_ids(ids, context, count, text)


def check_tokenizer(data: str, opened: Opened) -> None:
    """Refuse data that was made with another tokenizer: its ids mean other words."""
    shards, _ = splits(data)
    shards.check(opened.model.config.vocab)
    own, theirs = opened.tokenizer(), shards.tokenizer()
    if own is None:
        print(
            "note: the backbone has no tokenizer.json, so that the data was made with its "
            "tokens is taken on trust"
        )
    elif not same_words(own, theirs, TEXT):
        raise AmorError(
            f"{data} was prepared with another tokenizer than {opened.folder} has; "
            f"prepare it with --tokenizer {opened.folder / 'tokenizer.json'}"
        )


def same_words(a: Tokenizer, b: Tokenizer, text: str) -> bool:
    """Whether two tokenizers have the same vocabulary, and give the same ids for a text."""
    words = [t.get_vocab(with_added_tokens=True) for t in (a, b)]
    ids = [t.encode(text, add_special_tokens=False).ids for t in (a, b)]
    return words[0] == words[1] and ids[0] == ids[1]


@torch.no_grad()
def calibrate(model: Amor, windows: Windows) -> list[dict[str, float | None]]:
    """Set the thresholds of all gates from their scores on a text; per block the threshold, and the
    fraction of its tokens that fire.

    Blocks start as no-ops, so no decision changes the score of another block.
    """
    block_scores = join_chunks(run_windows(model, windows)).score
    if not all(bool(scores.isfinite().all()) for scores in block_scores):
        raise AmorError(
            f"scores of the gates on {windows.source} are not finite; are weights too large?"
        )
    for block, scores in zip(model.each_block(), block_scores, strict=True):
        block.gate.observe(scores.flatten())
    results: list[dict[str, float | None]] = []
    for gate, scores in zip(own_gates(model), block_scores, strict=True):
        fire, decider = None, gate.decider
        if isinstance(decider, Adaptive):
            fire = float((scores > decider.threshold).float().mean())
        results.append({"threshold": finite(float(decider.threshold)), "fire": fire})
    return results


def adapts(model: Amor) -> bool:
    """Whether any gate has a threshold that is set from scores."""
    return any(isinstance(gate.decider, Adaptive) for gate in own_gates(model))
