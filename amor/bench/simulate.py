"""What `amor bench decode` runs on: a state filled to any context, and gates that fire as often as they are told.

Filling a state directly takes a second where reading a prompt of 64K tokens would take hours on two cores. The numbers in
it are random; how long a step takes does not depend on them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from amor.bench.timing import lap
from amor.decode.engine import Engine, Session
from amor.decode.policy import Fixed
from amor.form import Part
from amor.gates.base import Evidence, Gate, Nothing, Verdict
from amor.gates.once import share_decision
from amor.judge.gates import own_gates
from amor.kv import KV, Buffer
from amor.models.amor import Amor
from amor.models.build import build
from amor.ops.spent import counting
from amor.presets import preset
from amor.program import Program, Vector
from amor.records.bench import Spent
from amor.state import State

SHORTEST, LONGEST = 15, 20  # tokens of a round; a rate is met by the best whole numbers among them
LESSONS, MOST_LESSONS = 512, 16  # tokens per sample that simulated gates have met, and samples until they predict
# share of probes an 8-bit head leaves in doubt, before and after the likeliest tokens are looked at exactly: by
# `amor bench decode --model` of a trained model (width 256, V = 8192), block by block 0.17, 0.20, 0.19 and 0.018, 0.021, 0.025
DOUBTS = (0.18, 0.021)


class Scheduled(Gate):
    """Fires at fixed places of a round, asks the head as the gate it stands for, and knows a cheap probe's doubt by a schedule.

    A simulated decision must not depend on random weights, but its probe has to run; so does a gate that asks no probe.
    """

    kind = "scheduled"
    Options = Nothing

    def __init__(self, own: Gate, rate: float, tokens: int, start: int, later: int = 0, doubts: tuple[int, int] = (0, 0)):
        """later: tokens by which it fires after the schedule; doubts: of a round, before and after the bound is narrowed."""
        super().__init__(0, Nothing(), 0)
        self._own = (own,)  # in a tuple: it is no part of this one
        self.plan, self.start = schedule(rate, later, tokens), start
        self.doubts, self.deep_doubts = ([(i + 3 * later) % tokens < count for i in range(tokens)] for count in doubts)
        self.asked = -1

    @property
    def needs(self) -> frozenset[str]:
        return self._own[0].needs

    def place(self, position: int) -> int:
        return (position - self.start) % len(self.plan)

    def forward(self, evidence: Evidence) -> Verdict:
        plans = [self.plan[self.place(p)] for p in evidence.position.flatten().tolist()]
        return Verdict(torch.tensor(plans).view(evidence.position.shape), self._own[0](evidence).score)

    def program(self, p: Program, x: Vector, score: Vector) -> None:
        self._own[0].program(p, x, score)

    def version_key(self) -> tuple[object, ...]:
        return self._own[0].version_key()

    def decide_interval(self, low: Sequence[float], high: Sequence[float], position: Sequence[int]) -> list[bool | None]:
        """Of a bound it is asked once by the 8-bit head, and where that left a doubt once more, of a narrower one."""
        place = self.place(position[0])
        doubts = self.deep_doubts if self.asked == position[0] else self.doubts
        if low != high:
            self.asked = position[0]
        unknown = low != high and doubts[place]
        return [None if unknown else self.plan[place]] * len(position)


def doubted(share: float, block: int, blocks: int, tokens: int) -> int:
    """How many tokens of a round one block is in doubt about, so that all blocks together come nearest to the share."""
    return (round(share * blocks * tokens) + blocks - 1 - block) // blocks if block < blocks else 0


def round_of(rate: float) -> tuple[int, int]:
    """How many tokens a round has, and how many fire, to come as near to a rate as up to LONGEST tokens allow."""
    sizes = range(SHORTEST, LONGEST + 1)
    size = min(sizes, key=lambda n: (abs(round(rate * n) / n - rate), n))
    return size, round(rate * size)


def schedule(rate: float, block: int, tokens: int) -> list[bool]:
    """Where a block fires in a round: evenly spread, each block a little later than the one before."""
    fired = round(rate * tokens)
    marks = [(i * fired) // tokens != ((i + 1) * fired) // tokens for i in range(tokens)]
    return [marks[(i - block) % tokens] for i in range(tokens)]


def speaking(name: str, scale: str) -> Amor:
    """A preset with fresh weights whose blocks speak and whose gates have met numbers, as those of a trained model.

    One that changes nothing would need no second reading of the head, and a gate that has learned nothing yet decides otherwise.
    """
    model = build(preset(name, scale)).eval()
    generator = torch.Generator().manual_seed(0)
    width = model.config.width
    with torch.no_grad():
        for block in model.each_block():
            block.attention.o_proj.weight.normal_(0, model.config.init_std, generator=generator)
            block.gate.observe(torch.rand(LESSONS, generator=generator))
            for _ in range(MOST_LESSONS):
                block.gate.learn(torch.randn(LESSONS, width, generator=generator), torch.rand(LESSONS, generator=generator))
                if block.gate.settled():
                    break
    return model


def filled(model: Amor, context: int, room: int) -> State:
    """A State of one row that has read `context` tokens: random keys and values, and a few real tokens' recurrent states."""
    with torch.no_grad():
        start = model(torch.arange(8)[None]).state
    parts = tuple(_filled(part, context, context + room) for part in start.parts)
    return State(torch.tensor([context]), parts, True, context)


def _filled(part: Part, context: int, capacity: int) -> Part:
    found: Part = {}
    for name, held in part.items():
        if isinstance(held, KV):
            _, heads, _, size = held.k.shape
            k, v = (torch.empty(1, heads, capacity, size).normal_() for _ in range(2))
            found[name] = KV(Buffer(k, v), 0, 0, context)
        else:
            found[name] = held.clone()
    return found


class Rounds:
    """Rounds of decode steps at a context; every round does the same work, and every token of it ends a lap.

    best: of the output only the best token is wanted. together: all blocks fire at the same tokens, as those of trained models
    nearly do (by `amor bench decode --model`: aimed at 22 %, some block at 24.9 % of tokens and all three at 21.3 %; of a model
    trained for five minutes 40 % and 9 %); else at different ones.
    """

    def __init__(self, engine: Engine, state: State, rate: float, best: bool = False, together: bool = True):
        self.base, self.best = state, best
        self.tokens, self.fired = round_of(rate)
        start, own = int(state.position[0]), own_gates(engine.model)
        asking = sum(1 for gate in own if gate.needs)
        gates = [
            Scheduled(
                gate.decider,
                self.rate,
                self.tokens,
                start,
                0 if together else k,
                (doubted(DOUBTS[0], k, asking, self.tokens), doubted(DOUBTS[1], k, asking, self.tokens)),
            )
            for k, gate in enumerate(own)
        ]
        # what a long run at this rate would have come to expect
        self.engine = engine.behind(share_decision(own, gates), Fixed(engine.savings.foresee and together))

    @property
    def rate(self) -> float:
        return self.fired / self.tokens

    def run(self) -> None:
        """One round."""
        for _ in self.pieces():
            lap()

    def pieces(self) -> Iterator[None]:
        """One round, token by token, and back to where it began: the keys written are given up, the recurrent states stay."""
        session = Session(self.engine, self.base, None)
        for gate in self.engine.gates:
            decider = gate.decider
            assert isinstance(decider, Scheduled)
            decider.asked = -1
        for token in range(self.tokens):
            _ = session.step(torch.tensor([17 + token]), self.best).entropy  # which writing shows of every token, gates or not
            yield
        self.base = back(session.state, self.base)

    def spend(self) -> Spent:
        """What one token spends on average over a round, counted where it is spent."""
        passes = self.engine.passes
        before = replace(passes)
        with counting() as spent:
            self.run()
        return Spent(
            bytes=spent.bytes / self.tokens,
            flops=spent.flops / self.tokens,
            spent={what: (flops / self.tokens, read / self.tokens) for what, (flops, read) in spent.by.items()},
            head_passes=(passes.exact - before.exact) / self.tokens,
            cheap_passes=(passes.cheap - before.cheap) / self.tokens,
        )


def back(state: State, base: State) -> State:
    """A State with the position of one it grew from: keys behind it are given up, recurrent tensors stay as they are now."""
    parts: list[Part] = []
    for part in state.parts:
        parts.append({name: held.claim(base.max_position) if isinstance(held, KV) else held for name, held in part.items()})
    return State(base.position, tuple(parts), base.rows_aligned, base.max_position)
