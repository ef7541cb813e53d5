"""How fast a model trains and decodes: the median step of its training, and decode steps after a
prompt of held-out text.

Decode is fed the text as it goes on, one row, with the engine's own savings. For a given firing
rate every gate gets the threshold that its scores on these very tokens exceed so often. Each round
starts from the same state; the best round counts.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from msgspec import Meta

from amor import typed
from amor.checks import Context
from amor.errors import AmorError
from amor.measures.base import MeasureKind
from amor.records import Amount, Record, Words

if TYPE_CHECKING:
    from amor.decode.engine import Session
    from amor.experiment.subject import FinishedRun
    from amor.gates.base import Gate
    from amor.models.amor import Amor
    from amor.study.results import Results


class SpeedOptions(Record, frozen=True):
    """What is timed."""

    # firing rates, besides the gates as they are
    rates: Annotated[tuple[typed.Share, ...], Meta(max_length=64)] = ()
    # tokens before the first timed step; None: as the run was trained
    context: Context | None = None
    # decode steps per round: a round of a tiny model takes milliseconds
    tokens: Annotated[int, Meta(ge=1, le=2**20)] = 64
    rounds: Annotated[int, Meta(ge=1, le=10_000)] = 5  # of which the best counts


class DecodeSpeed(Record, frozen=True):
    """Decode at one firing rate, per token."""

    rate: typed.Share | None  # that was aimed at; None: the gates as they are
    fire: typed.Share  # that was reached
    seconds: Amount  # in the best round
    median: Amount  # seconds in the median round
    bytes: Amount  # of weights and state that a token reads, in float32
    head_passes: Amount


class SpeedResult(Record, frozen=True):
    """Tokens per second of training (the median step), and decode; a clock gives another number
    each time."""

    train: Amount
    context: typed.Positive
    decode: tuple[DecodeSpeed, ...]
    notes: tuple[Words, ...]


class SpeedMeasure(MeasureKind):
    """Tokens per second of training and decode."""

    kind = "speed"
    Options, Result = SpeedOptions, SpeedResult
    needs_text = quiet_machine = True

    @staticmethod
    def measure(subject: FinishedRun, options: SpeedOptions) -> SpeedResult:
        """Time decode at every rate, rounds in turn."""
        from amor.judge.gates import own_gates
        from amor.judge.value import all_aimed

        model, context = subject.model, options.context or subject.recipe.context
        ids = _prompt(subject, context + options.tokens)
        own = own_gates(model)
        settings: list[tuple[float | None, Sequence[Gate]]] = [(None, own)]
        notes = set()
        for rate in options.rates if own else ():
            gates, trouble = all_aimed(own, rate)
            notes |= {trouble} if trouble else set()
            settings += [(rate, meet_rate(model, gates, rate, ids, context))] if gates else []
        rounds = [DecodeRounds(model, gates, ids[:context], ids[context:]) for _, gates in settings]
        # in turn, so that what else the machine does harms all alike
        for _ in range(1 + options.rounds):
            for each in rounds:
                each.run()
        timed = zip(settings, rounds, strict=True)
        decode = tuple(_speed(model, rate, each) for (rate, _), each in timed)
        train = statistics.median(line.timing.tokens_per_second for line in subject.steps)
        return SpeedResult(train=train, context=context, decode=decode, notes=tuple(sorted(notes)))


def decode_speeds(results: Results, row: str, rate: float | None) -> list[DecodeSpeed]:
    """How fast the runs of a row decode at a firing rate, one per seed; None: with the gates as
    they are."""
    measured = results.of(row, "speed").values()
    return [one for each in measured for one in each.decode if one.rate == rate]


def _prompt(subject: FinishedRun, tokens: int) -> list[int]:
    text = subject.held_out
    if text.tokens < tokens:
        lack = f"fewer than the {tokens:,} that decode is timed on"
        raise AmorError(f"{text.folder} holds {text.tokens:,} tokens, {lack}")
    return [int(token) for token in text.read(0, tokens)]


def meet_rate(
    model: Amor, gates: list[Gate], rate: float, ids: list[int], context: int
) -> list[Gate]:
    """Set adaptive gates to the thresholds that give this rate on the tokens after the context,
    block after block."""
    from amor.gates.base import Adaptive
    from amor.judge.loop import join_chunks, run_windows
    from amor.judge.windows import of_text

    text = of_text(ids)
    for block, gate in enumerate(gates):
        if not isinstance(gate, Adaptive):
            continue  # it fires by chance, or as the one it follows
        scores = join_chunks(run_windows(model, text, gates=gates)).score[block, 0, context:]
        scores = scores.sort(descending=True).values
        fired = round(rate * len(scores))
        if 0 < fired < len(scores):
            gate.quantiles.fill_(float(scores[fired - 1 : fired + 1].mean()))
        else:
            gate.aim(fired / len(scores))
    return gates


class DecodeRounds:
    """Rounds of decode steps through a text, each from the same state; the first one warms up."""

    def __init__(self, model: Amor, gates: Sequence[Gate], prompt: list[int], text: list[int]):
        import torch

        from amor.decode.engine import Engine

        self.engine = Engine(model, gates=gates)
        self.session: Session = self.engine.prefill([prompt], room=len(text))
        self.text = [torch.tensor([token]) for token in text]
        self.seconds: list[float] = []

    def run(self) -> None:
        """Time one round; the copy of the state is not timed."""
        from amor.bench.timing import clock

        session = self.session.fork()  # not timed: a longer state takes longer to copy

        def steps() -> None:
            for token in self.text:
                session.step(token)

        self.seconds.append(clock(steps))


def _speed(model: Amor, rate: float | None, rounds: DecodeRounds) -> DecodeSpeed:
    from amor.bench.timing import from_rounds

    tally, times = rounds.engine.stats, from_rounds(rounds.seconds[1:]).divided(len(rounds.text))
    fire = sum(tally.fired) / (len(tally.fired) * tally.tokens) if tally.fired else 0.0
    passes = tally.head_passes / tally.tokens
    cost = model.cost(int(rounds.session.position[0]), fire, passes)
    read, took = 4 * cost.weights + cost.state_read, {"seconds": times.best, "median": times.median}
    return DecodeSpeed(rate=rate, fire=fire, bytes=read, head_passes=passes, **took)
