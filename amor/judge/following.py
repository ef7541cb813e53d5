"""The ways of feeding tokens to the decode engine, for the equivalence contract: prompts, steps, rows that join and leave.

What an engine says inside a prompt is not seen, only from the prompt's last token on. A decision there that is a toss-up
could fall either way unseen, so a prompt ends before the first token whose decision is one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from amor.decode.engine import Engine, Session
from amor.decode.known import Next
from amor.judge.feeding import Feeder, Seen
from amor.state import State


class Followed:
    """Rows of a feeder that an engine reads on, and what it says of each token from the end of its prompt on."""

    def __init__(self, feeder: Feeder, engine: Engine):
        self.feeder, self.engine = feeder, engine
        self.tokens = [row[0].tolist() for row in feeder.rows()]
        self.known: list[list[Next]] = [[] for _ in self.tokens]  # of each row, a token each
        self.starts = [0] * len(self.tokens)  # the column of the first of them
        self.ends: list[State | None] = [None] * len(self.tokens)
        self.rows: list[int] = []  # that are in the session, in its order
        self.session: Session | None = None

    def prefill(self, rows: Sequence[int], lengths: Sequence[int], chunk: int = 512) -> None:
        """Read the beginnings of some rows; they join those that are there."""
        fresh = self.engine.prefill([self.tokens[row][:n] for row, n in zip(rows, lengths, strict=True)], chunk=chunk)
        self.session = fresh if self.session is None else self.session.join(fresh)
        self.rows += rows
        for row, length in zip(rows, lengths, strict=True):
            self.starts[row] = length - 1
        self.note(fresh.next, rows)
        self.leave()

    def begin(self, row: int) -> None:
        """Read a row from its very first token in steps: a prompt would be read by the model's forward."""
        self.session = self.engine.resume(self.engine.model.start(1))
        self.rows = [row]

    def step(self) -> None:
        assert self.session is not None
        tokens = [self.tokens[row][self.place(row)] for row in self.rows]
        self.note(self.session.step(tokens), self.rows)
        self.leave()

    def place(self, row: int) -> int:
        """How many tokens of a row were read."""
        return self.starts[row] + len(self.known[row])

    def note(self, found: Next, rows: Sequence[int]) -> None:
        for index, row in enumerate(rows):
            self.known[row].append(found.map(partial(_row, index)))

    def leave(self) -> None:
        """Rows that are at their end go; what they remember is kept."""
        assert self.session is not None
        ended = [index for index, row in enumerate(self.rows) if self.place(row) == len(self.tokens[row])]
        for index in ended:
            self.ends[self.rows[index]] = self.session.select([index]).state
        if ended:
            self.keep([index for index in range(len(self.rows)) if index not in ended])

    def keep(self, order: Sequence[int]) -> None:
        """Some rows of the session, in this order."""
        assert self.session is not None
        self.session = self.session.select(order) if order else None
        self.rows = [self.rows[index] for index in order]

    def finish(self) -> None:
        while self.rows:
            self.step()

    def seen(self) -> list[Seen]:
        blocks = range(len(self.feeder.model.each_block()))
        return [
            Seen(
                torch.stack([n.logits for n in known], 1),
                [torch.stack([n.score[:, k] for n in known], 1) for k in blocks],
                [torch.stack([n.fire[:, k] for n in known], 1) for k in blocks],
                state,
                start,
            )
            for known, state, start in zip(self.known, self.ends, self.starts, strict=True)
        ]


def _row(index: int, t: Tensor) -> Tensor:
    return t[index : index + 1].clone()


def engine_steps(feeder: Feeder, engine: Engine, clear: list[int]) -> list[Seen]:
    """Every row by itself: its first token, then token by token."""
    followed = Followed(feeder, engine)
    for row in range(len(feeder.lengths)):
        followed.prefill([row], [1])
        followed.finish()
    return followed.seen()


def engine_steps_only(feeder: Feeder, engine: Engine) -> list[Seen]:
    """Every row by itself, every token a step."""
    followed = Followed(feeder, engine)
    for row in range(len(feeder.lengths)):
        followed.begin(row)
        followed.finish()
    return followed.seen()


def engine_chunks(feeder: Feeder, engine: Engine, clear: list[int]) -> list[Seen]:
    """Every row by itself: a prompt of some length in chunks of some size, then token by token."""
    followed = Followed(feeder, engine)
    for row, length in enumerate(feeder.lengths):
        prompt = feeder.random.randint(1, min(length, clear[row]))
        followed.prefill([row], [prompt], chunk=feeder.random.randint(1, max(prompt // 2, 1)))
        followed.finish()
    return followed.seen()


def engine_rows(feeder: Feeder, engine: Engine, clear: list[int]) -> list[Seen]:
    """Ragged prompts together; others join while they are read on, in another order every time; rows leave where they end."""
    followed, count = Followed(feeder, engine), len(feeder.lengths)
    prompts = [feeder.random.randint(1, min(length, clear[row])) for row, length in enumerate(feeder.lengths)]
    halves = list(range(count // 2)), list(range(count // 2, count))
    for rows in halves:
        if rows:
            followed.prefill(rows, [prompts[row] for row in rows], chunk=feeder.random.randint(1, 64))
        for _ in range(3):
            order = list(range(len(followed.rows)))
            feeder.random.shuffle(order)
            if order:
                followed.keep(order)
                followed.step()
    followed.finish()
    return followed.seen()


ENGINE_WAYS: dict[str, Callable[[Feeder, Engine, list[int]], list[Seen]]] = {
    "engine steps": engine_steps,
    "engine, chunked prefill": engine_chunks,
    "engine, rows join and leave": engine_rows,
}
