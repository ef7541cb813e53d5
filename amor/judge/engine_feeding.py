"""Ways of feeding tokens to the decode engine, for `amor check`: prompts, steps, rows that join and
leave.

Outputs inside a prompt are not observed, only those from the prompt's last token on. A decision
inside it whose score lies at the threshold could fall either way unobserved, so a prompt ends
before the first token with such a decision.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from amor.decode.engine import Engine, Session
from amor.decode.step_output import StepOutput
from amor.judge.feeding import Feeder, FeedOutput
from amor.state import State


class EngineFeeder:
    """Rows of a feeder fed to an engine, with its outputs from the end of each prompt on."""

    def __init__(self, feeder: Feeder, engine: Engine):
        self.feeder, self.engine = feeder, engine
        self.tokens = [row[0].tolist() for row in feeder.rows()]
        self.outputs: list[list[StepOutput]] = [[] for _ in self.tokens]  # per row, one per token
        self.starts = [0] * len(self.tokens)  # the column of a row's first output
        self.ends: list[State | None] = [None] * len(self.tokens)
        self.rows: list[int] = []  # in the session, in its order
        self.session: Session | None = None

    def prefill(self, rows: Sequence[int], lengths: Sequence[int], chunk: int = 512) -> None:
        """Read the first tokens of some rows as prompts; the rows join the session."""
        prompts = [self.tokens[row][:n] for row, n in zip(rows, lengths, strict=True)]
        fresh = self.engine.prefill(prompts, chunk=chunk)
        self.session = fresh if self.session is None else self.session.join(fresh)
        self.rows += rows
        for row, length in zip(rows, lengths, strict=True):
            self.starts[row] = length - 1
        self.record(fresh.next, rows)
        self.drop_finished()

    def begin(self, row: int) -> None:
        """Start a row from an empty state: even its first token is a step of the engine."""
        self.session = self.engine.resume(self.engine.model.start(1))
        self.rows = [row]

    def step(self) -> None:
        """One token of every row in the session."""
        assert self.session is not None
        tokens = [self.tokens[row][self.position(row)] for row in self.rows]
        self.record(self.session.step(tokens), self.rows)
        self.drop_finished()

    def position(self, row: int) -> int:
        """How many tokens of a row have been read."""
        return self.starts[row] + len(self.outputs[row])

    def record(self, output: StepOutput, rows: Sequence[int]) -> None:
        """Keep the output of one step, row by row."""
        for index, row in enumerate(rows):
            self.outputs[row].append(output.map(partial(_row, index)))

    def drop_finished(self) -> None:
        """Rows that have been read to their end leave the session; their final states are kept."""
        assert self.session is not None
        ended = [
            i for i, row in enumerate(self.rows) if self.position(row) == len(self.tokens[row])
        ]
        for index in ended:
            self.ends[self.rows[index]] = self.session.select([index]).state
        if ended:
            self.keep([index for index in range(len(self.rows)) if index not in ended])

    def keep(self, order: Sequence[int]) -> None:
        """Reduce the session to some of its rows, in this order."""
        assert self.session is not None
        self.session = self.session.select(order) if order else None
        self.rows = [self.rows[index] for index in order]

    def finish(self) -> None:
        """Step until every row has been read."""
        while self.rows:
            self.step()

    def results(self) -> list[FeedOutput]:
        """The outputs of every row as one."""
        return [
            FeedOutput(
                torch.stack([step.logits for step in steps], 1),
                torch.stack([step.score for step in steps], 2),
                torch.stack([step.fire for step in steps], 2),
                state,
                start,
            )
            for steps, state, start in zip(self.outputs, self.ends, self.starts, strict=True)
        ]


def _row(index: int, t: Tensor) -> Tensor:
    return t[index : index + 1].clone()


def engine_steps(feeder: Feeder, engine: Engine, clear: list[int]) -> list[FeedOutput]:
    """Every row by itself: a prompt of one token, then token by token."""
    fed = EngineFeeder(feeder, engine)
    for row in range(len(feeder.lengths)):
        fed.prefill([row], [1])
        fed.finish()
    return fed.results()


def engine_steps_only(feeder: Feeder, engine: Engine) -> list[FeedOutput]:
    """Every row by itself, every token a step."""
    fed = EngineFeeder(feeder, engine)
    for row in range(len(feeder.lengths)):
        fed.begin(row)
        fed.finish()
    return fed.results()


def engine_chunks(feeder: Feeder, engine: Engine, clear: list[int]) -> list[FeedOutput]:
    """Every row by itself: a prompt of random length in random chunks, then token by token."""
    fed = EngineFeeder(feeder, engine)
    for row, length in enumerate(feeder.lengths):
        prompt = feeder.random.randint(1, min(length, clear[row]))
        fed.prefill([row], [prompt], chunk=feeder.random.randint(1, max(prompt // 2, 1)))
        fed.finish()
    return fed.results()


def engine_rows(feeder: Feeder, engine: Engine, clear: list[int]) -> list[FeedOutput]:
    """Ragged prompts; rows join later, change their order at every step, leave where they end."""
    fed, count = EngineFeeder(feeder, engine), len(feeder.lengths)
    prompts = [feeder.random.randint(1, min(n, clear[row])) for row, n in enumerate(feeder.lengths)]
    halves = list(range(count // 2)), list(range(count // 2, count))
    for rows in halves:
        if rows:
            fed.prefill(rows, [prompts[row] for row in rows], chunk=feeder.random.randint(1, 64))
        for _ in range(3):
            order = list(range(len(fed.rows)))
            feeder.random.shuffle(order)
            if order:
                fed.keep(order)
                fed.step()
    fed.finish()
    return fed.results()


# name in the table of `amor check` -> the way; clear: how long the prompt of each row may be
ENGINE_WAYS: dict[str, Callable[[Feeder, Engine, list[int]], list[FeedOutput]]] = {
    "engine steps": engine_steps,
    "engine, chunked prefill": engine_chunks,
    "engine, rows join and leave": engine_rows,
}
