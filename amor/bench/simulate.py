"""What `amor bench decode` runs on: a state filled to any context, and gates that fire as often as they are told.

Filling a state directly takes a second where reading a prompt of 64K tokens would take hours on two cores. The numbers in
it are random; how long a step takes does not depend on them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from amor.decode.engine import Engine, Session
from amor.decode.override import gated
from amor.gates.base import Evidence, Gate, Nothing, Verdict
from amor.models.amor import Amor
from amor.models.block import Block
from amor.models.build import SPREAD, build
from amor.ops.spent import Spent, counting
from amor.presets import preset
from amor.state import KV, Buffer, Part, State

LONGEST = 10  # tokens of a round; a rate is met by the best whole numbers up to here


class Scheduled(Gate):
    """Fires at fixed places of a round, asks the head as the entropy gate does, and knows a cheap probe's doubt by a schedule.

    A simulated decision must not depend on random weights, but its probe has to run.
    """

    kind = "scheduled"
    Options = Nothing
    needs = frozenset({"entropy"})

    def __init__(self, fire: list[bool], unsure: list[bool]):
        super().__init__(0, Nothing(), 0)
        self.plan, self.doubts, self.token = fire, unsure, -1
        self.start = 0

    def place(self, evidence: Evidence) -> int:
        return (int(evidence.position[0]) - self.start) % len(self.plan)

    def forward(self, evidence: Evidence) -> Verdict:
        assert evidence.entropy is not None
        fire = torch.full(evidence.position.shape, self.plan[self.place(evidence)])
        return Verdict(fire, evidence.entropy)

    def sure(self, low: Evidence, high: Evidence) -> Tensor:
        return torch.full(low.position.shape, not self.doubts[self.place(low)])


def round_of(rate: float) -> tuple[int, int]:
    """How many tokens a round has, and how many fire, to come as near to a rate as up to LONGEST tokens allow."""
    sizes = range(4, LONGEST + 1)
    size = min(sizes, key=lambda n: (abs(round(rate * n) / n - rate), n))
    return size, round(rate * size)


def schedule(rate: float, block: int, tokens: int) -> list[bool]:
    """Where a block fires in a round: evenly spread, each block a little later than the one before."""
    fired = round(rate * tokens)
    marks = [(i * fired) // tokens != ((i + 1) * fired) // tokens for i in range(tokens)]
    return [marks[(i - block) % tokens] for i in range(tokens)]


def speaking(name: str, scale: str) -> Amor:
    """A preset with fresh weights whose blocks speak: one that changes nothing would need no second reading of the head."""
    model = build(preset(name, scale)).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for block in model.each_block():
            block.attention.o_proj.weight.normal_(0, SPREAD, generator=generator)
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
    """Rounds of decode steps at a context; every round does the same work."""

    def __init__(self, engine: Engine, state: State, rate: float, unsure: float = 0.0):
        self.engine, self.base = engine, state
        self.tokens, self.fired = round_of(rate)
        blocks: list[Block] = engine.model.each_block()
        self.gates = [Scheduled(schedule(rate, k, self.tokens), schedule(unsure, k + 1, self.tokens)) for k in range(len(blocks))]
        for gate in self.gates:
            gate.start = int(state.position[0])

    @property
    def rate(self) -> float:
        return self.fired / self.tokens

    @contextmanager
    def gates_set(self) -> Iterator[None]:
        with gated(self.engine.model, self.gates):
            yield

    def run(self) -> None:
        """One round, and back to where it began: the keys written are given up, the recurrent states stay as they are."""
        session = Session(self.engine, self.base, None)
        with self.gates_set():
            for token in range(self.tokens):
                session.step(torch.tensor([17 + token]))
        self.base = self.base.cut_from(session.state)

    def spend(self) -> Spent:
        """What one token spends on average over a round."""
        with counting() as spent:
            self.run()
        return Spent({what: (flops / self.tokens, read / self.tokens) for what, (flops, read) in spent.by.items()})
