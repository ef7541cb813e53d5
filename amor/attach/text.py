"""The text that thresholds are set by: read with the backbone's own tokenizer, or refused where it
is of another one.
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
    """Windows of the text that thresholds are set by."""

    tokenizer = opened.tokenizer()
    if data:
        fits(data, opened)
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
            f"{text}: the tokenizer knows tokens that the model does not, up to "
            f"{int(ids.max())}; they cannot be read"
        )
    return of_ids(ids, context, count, text)


def fits(data: str, opened: Opened) -> None:
    """Data made with another tokenizer means other words by the same ids."""

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
    """Whether two tokenizers are one: the same tokens, and the same ids for a text."""
    words = [t.get_vocab(with_added_tokens=True) for t in (a, b)]
    ids = [t.encode(text, add_special_tokens=False).ids for t in (a, b)]
    return words[0] == words[1] and ids[0] == ids[1]


@torch.no_grad()
def calibrate(model: Amor, windows: Windows) -> list[dict[str, float | None]]:
    """Set thresholds from the scores of a text, all at once; of each block: threshold, and how
    often it fires there.

    Blocks start as no-ops, so the score of every token is what it would be whatever the others
    decide.
    """
    scores = join_chunks(run_windows(model, windows)).score
    for block, seen in zip(model.each_block(), scores, strict=True):
        block.gate.observe(seen.flatten())
    found = []
    for gate, seen in zip(own_gates(model), scores, strict=True):
        decider = gate.decider
        tau = finite(float(decider.threshold))
        fire = (
            float((seen > decider.threshold).float().mean())
            if isinstance(decider, Adaptive)
            else None
        )
        found.append({"threshold": tau, "fire": fire})
    return found


def adapts(model: Amor) -> bool:
    """Whether a gate has a threshold to be set."""
    return any(isinstance(gate.decider, Adaptive) for gate in own_gates(model))
