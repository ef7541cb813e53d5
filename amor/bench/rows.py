"""Decode of several rows: gated models beside their backbone, rows that join and leave, drafts.

Parts `rows`, `churn` and `drafts` of `amor bench decode`. Rows of one model stand one token apart,
so that their simulated gates fire at different steps.
"""

from __future__ import annotations

import argparse
import inspect
import random
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor

from amor.bench.simulate import ScheduledRounds, build_active, filled_state
from amor.bench.timing import alternate, interleaved
from amor.decode.engine import Engine
from amor.decode.generate import Draft, Generator
from amor.decode.sample import Sampler, Sampling
from amor.decode.session import Session
from amor.models.build import build
from amor.presets import preset
from amor.records.bench import DecodeResults

if TYPE_CHECKING:
    from amor.bench.decode import DecodePlan

OURS = "amor-mamba2"
VARIANTS = ("once", "gain", "router")
ROOM = 32  # tokens a row has memory for beyond its context; a round writes fewer
LENGTHS = range(100, 500, 50)  # contexts of the rows of `churn`
STAY = 10  # steps between a row that leaves and the next one
WRITTEN = 200  # tokens per round of `drafts`
PROMPT = 2000  # tokens read before them


def rows(plan: DecodePlan) -> DecodeResults:
    """Steps of 1, 8, ... rows: with closed gates, the paper's gate and its variants."""
    context, rate = plan.contexts[0], plan.rates[0]
    backbone = OURS.removeprefix("amor-")
    names = (backbone, OURS, *(f"{OURS}-{variant}" for variant in VARIANTS))
    engines = {name: Engine(build_active(name, plan.scale)) for name in names}
    for count in plan.rows:
        shape = {"scale": plan.scale, "context": context, "rows": count, "rate": rate}
        row = plan.table.row("rows", "product", "attend", **shape)

        def side(name: str, rate: float, count: int = count) -> ScheduledRounds:
            engine = engines[name]
            return ScheduledRounds(
                engine, filled_state(engine.model, context, ROOM), rate, rows=count
            )

        sides = {name: side(name, 0.0 if name == backbone else rate) for name in names}
        sides["closed"] = side(OURS, 0.0)
        times = interleaved({name: s.pieces for name, s in sides.items()}, plan.rounds)
        for name, s in sides.items():
            row.times[name] = times[name].divided(s.tokens)
            row.columns[name] = {"tokens/s": count / row.times[name].median}
            if name != backbone:
                words = "no firing" if name == "closed" else f"{s.rate:.0%} firing"
                model = OURS if name == "closed" else name
                label = f"{model} over its backbone at {words}, {count} rows"
                row.add_ratio(label, row.times[backbone], row.times[name])
        row.show()
    return DecodeResults()


def churn(plan: DecodePlan) -> DecodeResults:
    """Eight rows of different lengths; a row leaves and another joins every ten steps, or not."""
    engine = Engine(build(preset(OURS, plan.scale)).eval())
    generator = torch.Generator().manual_seed(0)
    vocab = engine.model.config.vocab
    prompts = [torch.randint(0, vocab, (n,), generator=generator).tolist() for n in LENGTHS]
    sessions = [engine.prefill([prompt], room=100) for prompt in prompts]
    steps = torch.randint(0, vocab, (8 * STAY, len(prompts)), generator=generator)

    def run(moves: bool) -> None:
        session = sessions[0].fork().join(*(s.fork() for s in sessions[1:]))
        for number, tokens in enumerate(steps):
            if moves and number % STAY == 0:
                fresh = sessions[number // STAY].fork()
                session = session.select(range(1, len(prompts))).join(fresh)
            session.step(tokens)

    row = plan.table.row("churn", "product", "attend", scale=plan.scale, rows=len(prompts))
    times = alternate({"static": partial(run, False), "churn": partial(run, True)}, plan.rounds)
    for name, each in times.items():
        row.times[name] = each.divided(len(steps))
    row.add_ratio("rows that join and leave over static ones", times["static"], times["churn"])
    row.show()
    return DecodeResults()


class ScriptedSampler(Sampler):
    """Chooses the tokens of a given text, whatever the model predicts."""

    def __init__(self, text: Sequence[int]):
        self.sampling, self.text, self.place = Sampling(temperature=0), text, 0

    def choose(self, logits: Tensor, rows: Sequence[int] | None = None) -> Tensor:
        """The next token of the text; the best token is looked for as in greedy decoding."""
        logits.argmax(-1)
        self.place += 1
        return torch.tensor([self.text[self.place - 1]])


class ScriptedGenerator(Generator):
    """Writes a given text."""

    text: Sequence[int]

    def new_sampler(self, names: Sequence[int], prompts: Sequence[Sequence[int]]) -> Sampler:
        """Chooses the tokens of the text."""
        return ScriptedSampler(self.text)


def drafts(plan: DecodePlan) -> DecodeResults:
    """Text with drafts over the same text without: code, a repeated text, and one without repeats.

    Weights are random, so the text is given: words, spaces and signs of a module of the standard
    library, which the sampler chooses whatever the model predicts.
    """
    engine = Engine(build(preset(OURS, plan.scale)).eval())
    code = words_of(inspect.getsource(argparse), engine.model.config.vocab)
    shuffled = random.Random(0).sample(code, len(code))
    read, written = (100, 20) if plan.quick else (PROMPT, WRITTEN)
    repeated = code[:written]
    for place in range(20, written, 50):  # an edit: every fiftieth word is another
        repeated[place] = code[-place]
    texts = {
        "code": (code[:read], code[read : read + written]),
        "a repeated text": (code[:read], repeated),
        "a text without repeats": (shuffled[:read], shuffled[read : read + written]),
    }
    for name, (prompt, text) in texts.items():
        base = engine.prefill([prompt], room=written + 16)
        sides = {draft: writes(engine, base, prompt, text, draft) for draft in ("none", "ngram")}
        before = engine.stats.drafted, engine.stats.accepted
        times = alternate(sides, plan.rounds)
        row = plan.table.row("drafts", "product", "attend", scale=plan.scale, text=name)
        row.times |= {label: each.divided(written) for label, each in times.items()}
        stats, rounds = engine.stats, plan.rounds + 1
        row.numbers["draft tokens per round"] = (stats.drafted - before[0]) / rounds
        row.numbers["accepted per round"] = (stats.accepted - before[1]) / rounds
        row.add_ratio(f"drafts over none, {name}", times["none"], times["ngram"])
        row.show()
    return DecodeResults()


def writes(
    engine: Engine, base: Session, prompt: list[int], text: list[int], draft: Draft
) -> Callable[[], None]:
    """A round: the text is written from a fork of one session."""
    tokenizer = Tokenizer(WordLevel({"w": 0}, unk_token="w"))

    def run() -> None:
        generator = ScriptedGenerator(
            *(engine, tokenizer, Sampling(temperature=0), len(text)),
            prefill=lambda ids: base.fork(),
            stop_ids=[engine.model.config.vocab - 1],
            draft=draft,
        )
        generator.text = text
        assert [piece.token for piece in generator.run([prompt])] == text

    return run


def words_of(source: str, vocab: int) -> list[int]:
    """Ids of the words, spaces and signs of a text, in the order they first occur."""
    ids: dict[str, int] = {}
    words = re.findall(r"\w+|\s+|[^\w\s]", source)
    return [ids.setdefault(word, len(ids) % (vocab - 1)) for word in words]
