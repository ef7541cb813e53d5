"""What a trained model shows: how it scores and gates held-out text, and texts it writes. RUN/findings.json holds this.

The report draws that file; it never opens a model. `amor report RUN` makes it again from the run's last checkpoint.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor

from amor.data.loader import Windows
from amor.data.shards import Shards
from amor.data.stats import counts, unigram_nll
from amor.decode.generate import generate_batch
from amor.errors import AmorError
from amor.judge.gates import own_gates
from amor.judge.loop import CorpusOutput, WindowSource, join_chunks, run_windows
from amor.judge.policies import PolicyEvaluator, shuffled
from amor.judge.resample import mean
from amor.judge.trace import trace
from amor.models.amor import Amor
from amor.numbers import finite, perplexity
from amor.records.findings import AttentionWorth, Findings, HeldOutLoss, Histogram, Loss, Worth
from amor.records.trace import Trace

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BINS = 60
TOKENS = 16_384  # of validation text read for the histograms; enough for smooth ones
COUNTED = 2**30  # training tokens counted for the unigram baseline at most; more would take minutes
PASSAGE = 160  # tokens of the held-out passage shown
WRITTEN = 120  # tokens of each text written
PROMPT = 12  # tokens of a held-out document that begin a text to be written
SEARCHED = 2**20  # held-out tokens in which documents are looked for
SAMPLES, TEMPERATURE = 3, 0.7


@dataclass(frozen=True)
class Held:
    """Held-out text, and the training text whose token frequencies it is compared with."""

    name: str  # of the split: "valid", or "train" where nothing is held out
    shards: Shards
    train: Shards
    text: WindowSource  # the windows of it that are judged
    rows: int  # of them, read at a time

    def starts(self) -> list[int]:
        """Where documents begin, as far as is looked, with room for a prompt."""
        tokens = self.shards.read(0, min(SEARCHED, self.shards.tokens))
        after = np.flatnonzero(tokens == self.shards.end_of_text) + 1
        return [0, *(int(start) for start in after if start + PROMPT <= len(tokens))]


def find(model: Amor, tokenizer: Tokenizer, held: Held, step: int) -> Findings:
    """Everything a report shows of a model: its loss, its unigram baseline and the scores of every gate, on the same windows."""
    found = join_chunks(run_windows(model, held.text, rows=held.rows))
    nll = float(found.nll.double().mean())
    if not math.isfinite(nll):
        raise AmorError(
            f"the loss of {model.config.name} on held-out text is {nll}: nothing can be shown of such a model"
        )
    asked = np.bincount(
        held.text[0 : len(held.text)].targets.flatten().numpy(), minlength=held.shards.vocab
    )
    return Findings(
        step=step,
        model=model.config.to_dict(),
        parameters=sum(p.numel() for p in model.parameters()),
        judged=HeldOutLoss(
            split=held.name, tokens=found.nll.numel(), nll=nll, perplexity=perplexity(nll)
        ),
        unigram=unigram(held.train, asked),
        blocks=tuple(
            histogram(score.float(), float(fire.double().mean()), float(gate.threshold))
            for fire, score, gate in zip(found.fire, found.score, own_gates(model), strict=True)
        ),
        texts=(passage(model, tokenizer, held), *samples(model, tokenizer, held)),
        attention=attention(model, held.text[0 : len(held.text)], found, held.rows)
        if model.blocks
        else None,
    )


def attention(model: Amor, windows: Windows, found: CorpusOutput, rows: int) -> AttentionWorth:
    """What the blocks save where they fired, beside as many firings handed out by chance and beside attention everywhere."""
    reader = PolicyEvaluator(model, windows, own_gates(model), rows)
    chance = reader.nll_with_mask(shuffled(found.fire, seed=0))

    def worth(nll: Tensor) -> Worth:
        saved, error = mean(reader.nll_closed - nll)
        return Worth(saved=saved, se=finite(error) or 0.0)

    rate = float(found.fire.double().mean())
    return AttentionWorth(
        fire=rate, gate=worth(found.nll), chance=worth(chance), everywhere=worth(reader.nll_open)
    )


def unigram(train: Shards, asked: np.ndarray) -> Loss | None:
    """The loss of guessing by the token frequencies of the training split; None for a split too long to count."""
    if train.tokens > COUNTED:
        return None
    nll = unigram_nll(counts(train), asked)
    return Loss(nll=finite(nll), perplexity=finite(perplexity(nll)))


def histogram(scores: Tensor, fire: float, threshold: float) -> Histogram:
    """Share of scores in equal bins of [0, 1], or of their own range where they leave it."""
    low, high = min(float(scores.min()), 0.0), max(float(scores.max()), 1.0)
    held = torch.histc(scores, BINS, low, high) / scores.numel()
    return Histogram(
        fire=fire,
        threshold=finite(threshold),
        low=low,
        high=high,
        shares=tuple(round(v, 6) for v in held.tolist()),
        median=float(scores.median()),
    )


def passage(model: Amor, tokenizer: Tokenizer, held: Held) -> Trace:
    """The beginning of the held-out text as the model reads it."""
    ids = held.shards.read(0, min(PASSAGE, held.shards.tokens)).tolist()
    return trace(
        model,
        tokenizer,
        ids,
        "Held-out text, read by the model" if held.name == "valid" else "Training text, read",
    )


def samples(model: Amor, tokenizer: Tokenizer, held: Held) -> list[Trace]:
    """Texts the model writes after the first words of held-out documents; the first `given` tokens were not written."""
    starts = held.starts()
    chosen = [starts[(k + 1) * len(starts) // (SAMPLES + 1)] for k in range(SAMPLES)]
    prompts = [
        tokenizer.decode(held.shards.read(s, min(PROMPT, held.shards.tokens - s)).tolist())
        for s in chosen
    ]
    title = f"Written by the model at temperature {TEMPERATURE:g}, after the words underlined"
    texts = generate_batch(model, tokenizer, prompts, max_tokens=WRITTEN, temperature=TEMPERATURE)
    found = []
    for text in texts:
        given = tokenizer.encode(text.prompt, add_special_tokens=False).ids
        found.append(replace(trace(model, tokenizer, given + text.tokens, title), given=len(given)))
    return found
