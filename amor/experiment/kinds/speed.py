"""How fast a model trains and writes: the median step of its training, and decode steps after a beginning of held-out text.

Decode is fed the text as it goes on, one row, with the engine's own savings. Asked for a firing rate, every gate gets the
threshold that its scores on these very tokens exceed so often. A round begins anew from the same state; the best round counts.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import torch

from amor.bench.timing import clock, from_rounds
from amor.decode.engine import Engine, Session
from amor.errors import AmorError
from amor.experiment.subject import Subject
from amor.gates.base import Adaptive, Gate
from amor.judge.gates import own_gates
from amor.judge.loop import gathered, read
from amor.judge.value import all_aimed
from amor.judge.windows import of_text
from amor.models.amor import Amor
from amor.records.study import Decoded, OnClock, Speed

VERSION = 1  # raised where it finds other numbers of the same run, which makes those that stand void


def judge(subject: Subject, asked: OnClock) -> Speed:
    model, context = subject.model, asked.context or subject.recipe.context
    ids = beginning(subject, context + asked.tokens)
    own = own_gates(model)
    settings: list[tuple[float | None, Sequence[Gate]]] = [(None, own)]
    notes = set()
    for rate in asked.rates if own else ():
        gates, trouble = all_aimed(own, rate)
        notes |= {trouble} if trouble else set()
        settings += [(rate, met(model, gates, rate, ids, context))] if gates else []
    rounds = [Rounds(model, gates, ids[:context], ids[context:]) for _, gates in settings]
    for _ in range(1 + asked.rounds):  # in turn, so that what else the machine does harms all alike
        for one in rounds:
            one.run()
    decode = tuple(told(model, rate, one) for (rate, _), one in zip(settings, rounds, strict=True))
    train = statistics.median(line.timing.tokens_per_second for line in subject.steps)
    return Speed(train=train, context=context, decode=decode, notes=tuple(sorted(notes)))


def beginning(subject: Subject, tokens: int) -> list[int]:
    held = subject.held_out
    if held.tokens < tokens:
        raise AmorError(f"{held.folder} holds {held.tokens:,} tokens, fewer than the {tokens:,} that decode is timed on")
    return [int(token) for token in held.read(0, tokens)]


def met(model: Amor, gates: list[Gate], rate: float, ids: list[int], context: int) -> list[Gate]:
    """Gates that are aimed at a rate, with the thresholds that meet it on the tokens after the context, block after block."""
    text = of_text(ids)
    for block, gate in enumerate(gates):
        if not isinstance(gate, Adaptive):
            continue  # it fires by chance, or as the one it follows
        scores = gathered(read(model, text, gates=gates)).score[block, 0, context:].sort(descending=True).values
        fired = round(rate * len(scores))
        if 0 < fired < len(scores):
            gate.quantiles.fill_(float(scores[fired - 1 : fired + 1].mean()))
        else:
            gate.aim(fired / len(scores))
    return gates


class Rounds:
    """Rounds of decode steps through a text, each from the same state; the first one warms up."""

    def __init__(self, model: Amor, gates: Sequence[Gate], prompt: list[int], text: list[int]):
        self.engine = Engine(model, gates=gates)
        self.session: Session = self.engine.prefill([prompt], room=len(text))
        self.text = [torch.tensor([token]) for token in text]
        self.seconds: list[float] = []

    def run(self) -> None:
        session = self.session.fork()  # not timed: a longer state takes longer to copy

        def steps() -> None:
            for token in self.text:
                session.step(token)

        self.seconds.append(clock(steps))


def told(model: Amor, rate: float | None, rounds: Rounds) -> Decoded:
    tally, times = rounds.engine.tally, from_rounds(rounds.seconds[1:]).divided(len(rounds.text))
    fire = sum(tally.fired) / (len(tally.fired) * tally.tokens) if tally.fired else 0.0
    passes = tally.head_passes / tally.tokens
    cost = model.cost(int(rounds.session.state.position[0]), fire, passes)
    read = 4 * cost.weights + cost.state_read
    return Decoded(rate=rate, fire=fire, seconds=times.best, median=times.median, bytes=read, head_passes=passes)
