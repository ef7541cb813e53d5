"""How a trained model fires: how often while it writes, whether its blocks fire together, and where an 8-bit head is in doubt.

Prompts of several lengths are written on greedy and sampled, as the paper reports it. The other two are of the text itself.
"""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from amor.data.loader import Windows
from amor.decode.engine import Engine, Session
from amor.decode.sample import Sampler, Sampling
from amor.errors import AmorError
from amor.gates.base import Gate
from amor.gates.override import all_aimed
from amor.judge.gates import own_gates
from amor.judge.loop import join_chunks, run_windows
from amor.judge.windows import of_ids
from amor.models.amor import Amor
from amor.models.folder import load
from amor.ops.head.reference import HeadStats
from amor.ops.product import pack, probe
from amor.ops.product.refine import refine
from amor.records.bench import OnText, Together, Written

LENGTHS, TEMPERATURES, NEW = (3072, 8192, 16384), (0.0, 1.0), 64
AIM = 0.22  # what the paper met
WINDOWS, WINDOW = 32, 256  # of the text that is read


def opened(folder: str, text: str | None) -> tuple[Amor, list[int]]:
    """A model with gates, and the tokens of a text."""
    model, tokenizer = load(folder)
    if text is None or tokenizer is None:
        raise AmorError("real firing rates need a text for the prompts (--text FILE) and a model folder with a tokenizer")
    if not model.blocks:
        raise AmorError(f"{model.config.name} has no gates, so it has no firing rate")
    ids = tokenizer.encode(Path(text).read_text(errors="replace"), add_special_tokens=False).ids
    if not ids:
        raise AmorError(f"{text} holds no text")
    return model.eval(), ids


def firing_rates(model: Amor, ids: list[int], lengths: tuple[int, ...] = LENGTHS) -> list[Written]:
    """Rates over NEW tokens after the first `length` tokens of a text; a text that is too short is repeated, and that is said."""
    found = []
    for length in lengths:
        prompt = (ids * (-(-length // len(ids))))[:length]
        engine = Engine(model)
        session = engine.prefill([prompt], room=NEW)
        for temperature in TEMPERATURES:
            rates = written(engine, session.fork(), prompt, temperature)
            rate, repeated = sum(rates) / len(rates), len(ids) < length
            found.append(Written(prompt=length, temperature=temperature, rate=rate, rates=rates, repeated=repeated))
            print(f"prompt {length}, T = {temperature:g}: fires {rate:.1%} of the time")
    return found


def written(engine: Engine, session: Session, prompt: list[int], temperature: float) -> tuple[float, ...]:
    """The rate of every block over the tokens written."""
    before, tokens = list(engine.tally.fired), engine.tally.tokens
    sampler = Sampler(Sampling(temperature=temperature), [0], [prompt], engine.model.config.vocab)
    for _ in range(NEW):
        session.step(sampler.choose(session.next.logits))
    counted = engine.tally.tokens - tokens
    return tuple((now - was) / counted for now, was in zip(engine.tally.fired, before, strict=True))


def firing_on(model: Amor, ids: list[int]) -> OnText | None:
    """What amor/bench/simulate.py imitates, on the text itself; None for gates that look at more than the entropy."""
    if any(type(gate.decider).decide_interval is Gate.decide_interval for gate in own_gates(model)):
        return None
    repeated = ids * -(-(2 * WINDOW + 1) // len(ids))  # at least two windows
    windows = of_ids(np.array(repeated), WINDOW, WINDOWS, "the text")
    shares, doubted = together(model, windows), doubts(model, windows)
    print(
        f"aimed at {AIM:.0%}: some block fires at {shares.some:.1%} of tokens, all at {shares.all:.1%}; "
        f"{shares.followed:.0%} are followed"
    )
    for block, (first, refined) in enumerate(doubted):
        print(f"block {block}: an 8-bit head is in doubt at {first:.1%} of tokens, refined at {refined:.1%}")
    return OnText(together=shares, doubts=tuple(doubted))


def together(model: Amor, windows: Windows) -> Together:
    fires = join_chunks(run_windows(model, windows, gates=all_aimed(own_gates(model), AIM))).fire.flatten(1)
    later = fires.flip(0).cummax(0).values.flip(0)[1:]  # whether some block from the next one on fires
    followed = (fires[:-1] & later).sum() / fires[:-1].sum().clamp(min=1)
    some, every = fires.any(0).float().mean(), fires.all(0).float().mean()
    return Together(some=float(some), all=float(every), followed=float(followed))


@torch.no_grad()
def doubts(model: Amor, windows: Windows) -> list[tuple[float, float]]:
    """For each block that decides the share of tokens its gate cannot decide by an 8-bit head, and by one whose likeliest tokens
    are exact."""
    exact, copy = pack(model.head_weight), pack(model.head_weight, "int8", bounded=True)
    found = []
    for gate, asked in zip(own_gates(model), asked_about(model, windows), strict=True):
        if not gate.needs:
            continue
        x = asked[::5]  # every fifth token tells as much
        first = probe(x, copy, logits=True)
        assert first.logits is not None
        told = first, refine(x, exact, copy, first.logits)
        before, after = (undecided(gate, one, exact.outputs) for one in told)
        still = [a and b for a, b in zip(before, after, strict=True)]  # the likeliest are looked at where there was a doubt
        found.append((sum(before) / len(x), sum(still) / len(x)))
    return found


def asked_about(model: Amor, windows: Windows) -> list[Tensor]:
    """A block: the vectors [tokens, D] about which the head is asked."""
    kept: list[list[Tensor]] = [[] for _ in model.each_block()]

    def keep(mine: list[Tensor], block: nn.Module, args: tuple[Tensor, ...]) -> None:
        mine.append(model.asked(*args[:2]).flatten(0, 1))  # the residual, and what the block reads of it

    hooks = [block.register_forward_pre_hook(partial(keep, mine)) for block, mine in zip(model.blocks, kept, strict=True)]
    for _ in run_windows(model, windows):
        pass
    for hook in hooks:
        hook.remove()
    return [torch.cat(mine) for mine in kept]


def undecided(gate: Gate, found: HeadStats, vocab: int) -> list[bool]:
    """[R] whether a gate decides differently at the two ends of what is known of the entropy."""
    assert found.entropy is not None and found.bound is not None
    entropy, off = found.entropy / math.log(vocab), found.bound / math.log(vocab)
    fires = gate.decide_interval((entropy - off).tolist(), (entropy + off).tolist(), [0] * len(entropy))
    assert fires is not None
    return [fire is None for fire in fires]
