"""What a trained model shows, as one file RUN/findings.json: how it scores and gates held-out text, and texts it writes.

The report draws this file; it never opens a model. `amor report RUN` makes the file again from the run's last checkpoint.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from amor.data.loader import Batches
from amor.data.shards import Shards
from amor.data.stats import counts
from amor.decode.generate import generate
from amor.errors import AmorError
from amor.judge.trace import trace
from amor.models.amor import Amor
from amor.models.block import Trace
from amor.models.folder import load
from amor.run import Run
from amor.train.checkpoint import read_trainer
from amor.train.recipe import Recipe
from amor.train.step import Piece, piece
from amor.train.watch import perplexity

FILE = "findings.json"
BINS = 60
TOKENS = 16_384  # of validation text read for the histograms; enough for smooth ones
COUNTED = 2**30  # training tokens counted for the unigram baseline at most; more would take minutes
PASSAGE = 160  # tokens of the held-out passage shown
WRITTEN = 120  # tokens of each text written
PROMPT = 12  # tokens of a held-out document that begin a text to be written
SEARCHED = 2**20  # held-out tokens in which documents are looked for
SAMPLES, TEMPERATURE = 3, 0.7


def find(run: Run, data: str | None = None) -> dict[str, Any]:
    """Look at the newest checkpoint of a run; what was found is also written into the run. data: where its data is now."""
    recipe = Recipe.from_dict(run.read_config() | ({"data": data} if data else {}))
    folder = run.folder / "latest"
    if not folder.is_dir():
        raise AmorError(f"{run.folder} holds no checkpoint yet, so there is no model to look at; train it first")
    model, tokenizer = load(folder)
    if tokenizer is None:
        raise AmorError(f"{folder} holds no tokenizer.json, so its tokens cannot be shown as text")
    held = Held(recipe)
    found = {
        "step": read_trainer(folder)["step"],
        "model": model.config.to_dict(),
        "parameters": sum(p.numel() for p in model.parameters()),
        **judged(model, held),
        "texts": [passage(model, tokenizer, held), *samples(model, tokenizer, held)],
    }
    run.write(run.folder / FILE, found)
    return found


class Held:
    """The validation split of a run, or its training split where it has none, cut as evaluation cuts it."""

    def __init__(self, recipe: Recipe):
        folder = Path(recipe.data)
        if not (folder / "train").is_dir() and not (folder / "manifest.json").is_file():
            raise AmorError(f"the data of this run, {folder}, is gone; the samples and histograms need it, give --data FOLDER")
        self.train = Shards.open(folder / "train" if (folder / "train").is_dir() else folder)
        self.name = "valid" if (folder / "valid" / "manifest.json").is_file() else "train"
        self.shards = Shards.open(folder / "valid") if self.name == "valid" else self.train
        windows = min(recipe.eval.windows, (self.shards.tokens - 1) // recipe.context, max(TOKENS // recipe.context, 1))
        if not windows:
            raise AmorError(f"{self.shards.folder} holds fewer tokens than one window of {recipe.context}")
        self.batches, self.windows = Batches(self.shards, recipe.context, windows, recipe.seed), windows
        self.recipe, self.at_once = recipe, max(1, min(recipe.micro_batch, 4096 // recipe.context))

    def starts(self) -> list[int]:
        """Where documents begin, as far as is looked, with room for a prompt."""
        tokens = self.shards.read(0, min(SEARCHED, self.shards.tokens))
        after = np.flatnonzero(tokens == self.shards.end_of_text) + 1
        return [0, *(int(start) for start in after if start + PROMPT <= len(tokens))]

    def pieces(self) -> Iterator[Piece]:
        """The windows, a few at a time, with documents joined or apart as in training."""
        for first in range(0, self.windows, self.at_once):
            tokens, targets = self.batches.rows(0, first, min(first + self.at_once, self.windows))
            yield piece(tokens, targets, self.recipe, self.shards.end_of_text)


@torch.no_grad()
def judged(model: Amor, held: Held) -> dict[str, Any]:
    """Loss, its unigram baseline and the histogram of every gate's scores, all on the same windows."""
    nll = scored = 0.0
    scores: list[list[Tensor]] = [[] for _ in model.blocks]
    fired = torch.zeros(len(model.blocks), dtype=torch.float64)
    seen = np.zeros(held.shards.vocab, dtype=np.int64)
    for part in held.pieces():
        out = model(part.tokens, reset=part.reset, targets=part.targets, share=0.0)
        nll, scored = nll + float(out.nll.double().sum()), scored + part.targets.numel()
        seen += np.bincount(part.targets.flatten().numpy(), minlength=len(seen))
        for block, gate in enumerate(out.gates):
            scores[block].append(gate.score.flatten().float())
            fired[block] += gate.fire.sum()
    mean = nll / scored
    return {
        "judged": {"split": held.name, "tokens": int(scored), "nll": mean, "perplexity": perplexity(mean)},
        "unigram": unigram(held.train, seen),
        "blocks": [
            {"fire": float(f / scored), "threshold": threshold(g), **histogram(torch.cat(s))}
            for f, g, s in zip(fired, out.gates, scores, strict=True)
        ],
    }


def unigram(train: Shards, asked: np.ndarray) -> dict[str, float] | None:
    """The loss of guessing by the token frequencies of the training split; None for a split too long to count."""
    if train.tokens > COUNTED:
        return None
    known = counts(train) + 1
    nll = float((asked * (np.log(known.sum()) - np.log(known))).sum() / asked.sum())
    return {"nll": nll, "perplexity": perplexity(nll)}


def histogram(scores: Tensor) -> dict[str, Any]:
    """Share of scores in equal bins of [0, 1], or of their own range where they leave it."""
    low, high = min(float(scores.min()), 0.0), max(float(scores.max()), 1.0)
    held = torch.histc(scores, BINS, low, high) / scores.numel()
    return {"low": low, "high": high, "shares": [round(v, 6) for v in held.tolist()], "median": float(scores.median())}


def threshold(gate: Trace) -> float | None:
    """The number scores are compared with; None where nothing is compared."""
    return float(gate.threshold) if bool(torch.isfinite(gate.threshold)) else None


def passage(model: Amor, tokenizer: Any, held: Held) -> dict[str, Any]:
    """The beginning of the held-out text as the model reads it."""
    ids = held.shards.read(0, min(PASSAGE, held.shards.tokens)).tolist()
    return trace(model, tokenizer, ids, "Held-out text, read by the model" if held.name == "valid" else "Training text, read")


def samples(model: Amor, tokenizer: Any, held: Held) -> list[dict[str, Any]]:
    """Texts the model writes after the first words of held-out documents; the first `given` tokens were not written."""
    starts = held.starts()
    chosen = [starts[(k + 1) * len(starts) // (SAMPLES + 1)] for k in range(SAMPLES)]
    prompts = [tokenizer.decode(held.shards.read(s, min(PROMPT, held.shards.tokens - s)).tolist()) for s in chosen]
    title = f"Written by the model at temperature {TEMPERATURE:g}, after the words underlined"
    texts = generate(model, tokenizer, prompts, max_tokens=WRITTEN, temperature=TEMPERATURE)
    assert isinstance(texts, list)
    found = []
    for text in texts:
        given = tokenizer.encode(text.prompt, add_special_tokens=False).ids
        found.append(trace(model, tokenizer, given + text.tokens, title) | {"given": len(given)})
    return found
