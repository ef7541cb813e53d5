"""What `amor bench decode` runs on: a state filled to any context, and gates that fire at a given
rate.

Filling a state directly takes a second where reading a prompt of 64K tokens would take hours on two
cores. Its numbers are random; the duration of a step does not depend on them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from weakref import WeakSet

import torch
from torch import Tensor

from amor.decode.engine import Engine, Session
from amor.decode.policy import Fixed
from amor.decode.rows import RowMemory
from amor.form import Part
from amor.gates.base import Evidence, Gate, Nothing, Verdict
from amor.gates.follower import share_decision
from amor.judge.gates import own_gates
from amor.kv import KV, Buffer
from amor.models.amor import Amor
from amor.models.build import build
from amor.ops.spent import counting
from amor.presets import preset
from amor.program import Program, Vector
from amor.records.bench import DecodeCost
from amor.state import State

SHORTEST, LONGEST = 15, 20  # tokens per round; the length that fits a firing rate best is used
SAMPLE, MOST_SAMPLES = 512, 16  # tokens per sample shown to simulated gates; samples at most


class ScheduledGate(Gate):
    """Fires at fixed places of a round, and reads the head as often as the gate it replaces.

    The decision of a simulated gate must not depend on random weights, but its reading of the head
    has to run and be timed.
    """

    kind = "scheduled"
    Options = Nothing
    by_position = True

    def __init__(self, own: Gate, rate: float, tokens: int, start: int, later: int = 0):
        """own: the gate it replaces; rate: firing rate; tokens: per round; start: position of the
        first; later: tokens by which its firings come after the schedule's."""
        super().__init__(0, Nothing(), 0)
        self._own = (own,)  # in a tuple, so that it is not registered as a submodule
        self.plan, self.start = schedule(rate, later, tokens), start

    @property
    def needs(self) -> frozenset[str]:
        """What the gate it replaces reads."""
        return self._own[0].needs

    def place(self, position: int) -> int:
        """The place in the round of a position in the text."""
        return (position - self.start) % len(self.plan)

    def forward(self, evidence: Evidence) -> Verdict:
        """Fire by the schedule, score as the gate it replaces."""
        plans = [self.plan[self.place(p)] for p in evidence.position.flatten().tolist()]
        fire = torch.tensor(plans).view(evidence.position.shape)
        return Verdict(fire, self._own[0](evidence).score)

    def program(self, p: Program, x: Vector, score: Vector) -> None:
        """The score of the gate it replaces."""
        self._own[0].program(p, x, score)

    def version_key(self) -> tuple[object, ...]:
        """That of the gate it replaces."""
        return self._own[0].version_key()

    def fires(self, scores: Sequence[float], positions: Sequence[int]) -> list[bool]:
        """Decisions by the schedule, one per position."""
        return [self.plan[self.place(p)] for p in positions]


def round_size(rate: float) -> tuple[int, int]:
    """Tokens per round and how many of them fire, as near to a rate as LONGEST tokens allow."""
    sizes = range(SHORTEST, LONGEST + 1)
    size = min(sizes, key=lambda n: (abs(round(rate * n) / n - rate), n))
    return size, round(rate * size)


def schedule(rate: float, later: int, tokens: int) -> list[bool]:
    """Where a gate fires in a round: evenly spaced, and shifted by `later` tokens."""
    fired = round(rate * tokens)
    marks = [(i * fired) // tokens != ((i + 1) * fired) // tokens for i in range(tokens)]
    return [marks[(i - later) % tokens] for i in range(tokens)]


def build_active(name: str, scale: str) -> Amor:
    """A preset with fresh weights whose blocks change the residual and whose gates have statistics,
    as in a trained model.

    A block that changes nothing would need no second reading of the head, and a gate without
    statistics decides in another way.
    """
    model = build(preset(name, scale)).eval()
    generator = torch.Generator().manual_seed(0)
    width = model.config.width
    with torch.no_grad():
        for block in model.each_block():
            weight = block.attention.o_proj.weight
            weight.normal_(0, model.config.init_std, generator=generator)
            block.gate.observe(torch.rand(SAMPLE, generator=generator))
            for _ in range(MOST_SAMPLES):
                x = torch.randn(SAMPLE, width, generator=generator)
                block.gate.learn(x, torch.rand(SAMPLE, generator=generator))
                if block.gate.settled():
                    break
    return model


def filled_state(model: Amor, context: int, room: int) -> State:
    """A State of one row after `context` tokens, with space for `room` more: random keys and
    values, and the recurrent states of a few real tokens."""

    def filled(value: Tensor | KV) -> Tensor | KV:
        if not isinstance(value, KV):
            return value.clone()
        _, heads, _, size = value.k.shape
        k, v = (torch.empty(1, heads, context + room, size).normal_() for _ in range(2))
        return KV(Buffer(k, v), 0, 0, context)

    with torch.no_grad():
        start = model(torch.arange(8)[None]).state
    return State(torch.tensor([context]), changed(start, filled), True, context)


def changed(state: State, change: Callable[[Tensor | KV], Tensor | KV]) -> tuple[Part, ...]:
    """The parts of a State, each of their entries changed."""
    return tuple({name: change(value) for name, value in part.items()} for part in state.parts)


class ScheduledRounds:
    """Rounds of decode steps at one context. Every round does the same work.

    together: all blocks fire at the same tokens, as those of trained models nearly do (measured by
    `python -m benchmarks firing`: aimed at 22 %, some block fires at 24.9 % of tokens and all three
    at 21.3 %; after five minutes of training 40 % and 9 %). Otherwise they fire at different ones.
    """

    def __init__(
        self, engine: Engine, state: State, rate: float, together: bool = True, rows: int = 1
    ):
        """rows: of copies of the state, which is of one row, each one token shorter than the one
        before, so that their gates fire at different steps."""
        self.tokens, self.fired = round_size(rate)
        start, own = int(state.position[0]), own_gates(engine.model)
        gates = [
            ScheduledGate(gate.decider, self.rate, self.tokens, start, 0 if together else k)
            for k, gate in enumerate(own)
        ]
        # the speculation that a long run at this rate would have settled on
        self.engine = engine.behind(
            share_decision(own, gates),
            Fixed(engine.savings.speculate and together and self.fired > 0),
        )
        self.base = self.engine.own_rows(state, self.tokens)
        if rows > 1:
            assert isinstance(self.base, RowMemory)
            apart = [row % start for row in range(rows)]
            self.base = rewound(self.base.select([0] * rows), apart)

    @property
    def rate(self) -> float:
        """The firing rate of a round."""
        return self.fired / self.tokens

    def run(self) -> None:
        """One round."""
        deque(self.pieces(), 0)

    def pieces(self) -> Iterator[None]:
        """One round, token by token, then back to where it began: the keys it wrote are dropped,
        the recurrent states stay."""
        session = Session(self.engine, self.base, None)
        for token in range(self.tokens):
            # `amor generate` shows the entropy of every token, gates or not
            _ = session.step([17 + token + row for row in range(session.rows)]).entropy
            yield
        self.base = rewound(session.memory, [self.tokens] * session.rows)

    def cost(self) -> DecodeCost:
        """What one token costs on average over a round, counted while it runs."""
        passes = self.engine.passes
        before = replace(passes)
        with counting() as spent:
            self.run()
        return DecodeCost(
            bytes=spent.bytes / self.tokens,
            flops=spent.flops / self.tokens,
            breakdown={
                part: (flops / self.tokens, read / self.tokens)
                for part, (flops, read) in spent.by.items()
            },
            head_passes=(passes.passes - before.passes) / self.tokens,
        )


def rewound(memory: State | RowMemory, tokens: Sequence[int]) -> State | RowMemory:
    """The same rows some tokens before: later keys are dropped, recurrent tensors stay as they
    are."""
    if isinstance(memory, RowMemory):
        rows = [
            replace(row, position=row.position - count, holders=WeakSet())
            for row, count in zip(memory.rows, tokens, strict=True)
        ]
        return RowMemory(memory.form, rows)
    position = memory.max_position - tokens[0]
    parts = changed(memory, lambda t: t.claim(position) if isinstance(t, KV) else t)
    return State(memory.position - tokens[0], parts, memory.rows_aligned, position)
