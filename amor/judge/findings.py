"""RUN/findings.json: how a trained model scores and gates held-out text, and texts it generates.

The report draws that file and never opens a model. `amor report RUN` makes it again from the run's
last checkpoint.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

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
from amor.judge.trace import trace
from amor.judge.value import saving
from amor.models.amor import Amor
from amor.numbers import finite, perplexity
from amor.records.findings import AttentionWorth, Findings, HeldOutLoss, Histogram, Loss
from amor.records.trace import Trace

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BINS = 60
TOKENS = 16_384  # of validation text read for the histograms; enough for smooth ones
COUNTED = 2**30  # training tokens counted for the unigram baseline at most; more would take minutes
PASSAGE = 160  # tokens of the held-out passage shown
WRITTEN = 120  # tokens of each text generated
PROMPT = 12  # tokens of a held-out document that begin a text to be generated
SEARCHED = 2**20  # held-out tokens that are searched for the beginnings of documents
SAMPLES, TEMPERATURE = 3, 0.7


@dataclass(frozen=True)
class HeldOutText:
    """Held-out text, and the training text whose token frequencies it is compared with."""

    name: str  # of the split: "valid", or "train" where nothing is held out
    shards: Shards
    train: Shards
    text: WindowSource  # the windows of it that are evaluated
    rows: int  # windows per forward call

    def starts(self) -> list[int]:
        """First tokens of documents with room for a prompt, among the first SEARCHED tokens."""
        tokens = self.shards.read(0, min(SEARCHED, self.shards.tokens))
        after = np.flatnonzero(tokens == self.shards.end_of_text) + 1
        return [0, *(int(start) for start in after if start + PROMPT <= len(tokens))]


def find(model: Amor, tokenizer: Tokenizer, source: HeldOutText, step: int) -> Findings:
    """The loss of a model, its unigram baseline and the scores of every gate, on one text."""
    output = join_chunks(run_windows(model, source.text, rows=source.rows))
    nll, tokens = float(output.nll.double().mean()), output.nll.numel()
    windows = source.text[0 : len(source.text)]
    if not math.isfinite(nll):
        loss = f"the loss of {model.config.name} on held-out text is {nll}"
        raise AmorError(f"{loss}: nothing can be shown of such a model")
    targets = windows.targets.flatten().numpy()
    frequencies = np.bincount(targets, minlength=source.shards.vocab)
    return Findings(
        step=step,
        model=model.config.to_dict(),
        parameters=sum(p.numel() for p in model.parameters()),
        judged=HeldOutLoss(nll=nll, perplexity=perplexity(nll), split=source.name, tokens=tokens),
        unigram=unigram(source.train, frequencies),
        blocks=tuple(
            histogram(score.float(), float(fire.double().mean()), float(gate.threshold))
            for fire, score, gate in zip(output.fire, output.score, own_gates(model), strict=True)
        ),
        texts=(passage(model, tokenizer, source), *samples(model, tokenizer, source)),
        attention=attention(model, windows, output, source.rows) if model.blocks else None,
    )


def attention(model: Amor, windows: Windows, output: CorpusOutput, rows: int) -> AttentionWorth:
    """What the blocks save where they fired, at as many random tokens, and everywhere."""
    reader = PolicyEvaluator(model, windows, own_gates(model), rows)
    chance = reader.nll_with_mask(shuffled(output.fire, seed=0))
    return AttentionWorth(
        fire=float(output.fire.double().mean()),
        gate=saving(reader.nll_closed, output.nll),
        chance=saving(reader.nll_closed, chance),
        everywhere=saving(reader.nll_closed, reader.nll_open),
    )


def unigram(train: Shards, frequencies: np.ndarray) -> Loss | None:
    """The loss of guessing targets, counted in `frequencies` [V], by the token frequencies of
    training; None for a split too long to count."""
    if train.tokens > COUNTED:
        return None
    nll = unigram_nll(counts(train), frequencies)
    return Loss(nll=finite(nll), perplexity=finite(perplexity(nll)))


def histogram(scores: Tensor, fire: float, threshold: float) -> Histogram:
    """Share of scores in equal bins of [0, 1], or of their own range where they leave it."""
    low, high = min(float(scores.min()), 0.0), max(float(scores.max()), 1.0)
    shares = torch.histc(scores, BINS, low, high) / scores.numel()
    return Histogram(
        fire=fire,
        threshold=finite(threshold),
        low=low,
        high=high,
        shares=tuple(round(share, 6) for share in shares.tolist()),
        median=float(scores.median()),
    )


def passage(model: Amor, tokenizer: Tokenizer, source: HeldOutText) -> Trace:
    """The beginning of the held-out text as the model reads it."""
    ids = source.shards.read(0, min(PASSAGE, source.shards.tokens)).tolist()
    valid = source.name == "valid"
    title = "Held-out text, read by the model" if valid else "Training text, read"
    return trace(model, tokenizer, ids, title)


def samples(model: Amor, tokenizer: Tokenizer, source: HeldOutText) -> list[Trace]:
    """Texts the model generates after the first tokens of held-out documents."""
    starts, shards = source.starts(), source.shards
    chosen = [starts[(k + 1) * len(starts) // (SAMPLES + 1)] for k in range(SAMPLES)]
    ids = [shards.read(start, min(PROMPT, shards.tokens - start)).tolist() for start in chosen]
    prompts = [tokenizer.decode(each) for each in ids]
    title = f"Written by the model at temperature {TEMPERATURE:g}, after the words underlined"
    traces = []
    how: Any = {"max_tokens": WRITTEN, "temperature": TEMPERATURE}
    for text in generate_batch(model, tokenizer, prompts, **how):
        whole = trace(model, tokenizer, text.prompt_tokens + text.tokens, title)
        traces.append(replace(whole, given=len(text.prompt_tokens)))
    return traces
