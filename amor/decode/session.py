"""Sessions: rows being generated, and prompts being read chunk by chunk."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from amor.decode.rows import RowMemory
from amor.decode.step_output import StepOutput
from amor.errors import AmorError
from amor.layout import check_token_ids
from amor.state import State

if TYPE_CHECKING:
    from amor.decode.engine import Engine


class Session:
    """Rows being generated: their memory, and the prediction of each row's next token.

    Where all of a step is compiled, rows have memory of their own (`RowMemory`), and to join,
    select or fork copies nothing; otherwise the memory is one State, and each of them copies it.
    """

    def __init__(
        self,
        engine: Engine,
        memory: State | RowMemory,
        output: StepOutput | None,
        room: int = 0,
    ):
        """room: tokens that the rows of a State get memory for."""
        self.engine, self._next = engine, output
        self._ahead: tuple[StepOutput, list[int]] | None = None  # of `step_ahead`, until `accept`
        self.memory = engine.own_rows(memory, room) if isinstance(memory, State) else memory

    @property
    def state(self) -> State:
        """The State of the rows; where rows have memory of their own, a copy."""
        return self.memory if isinstance(self.memory, State) else self.memory.state()

    @property
    def position(self) -> Tensor:
        """[R] tokens that each row has read."""
        return self.memory.position

    @property
    def next(self) -> StepOutput:
        """The prediction of each row's next token."""
        if self._next is None:
            raise AmorError("there is no prediction of the next token here: call step() first")
        return self._next

    @property
    def rows(self) -> int:
        """The number of rows."""
        return len(self.position)

    def step(self, tokens: Tensor | Sequence[int]) -> StepOutput:
        """Read one token per row."""
        tokens = torch.as_tensor(tokens, device=self.position.device)
        if tokens.shape != (self.rows,):
            raise AmorError(
                f"step takes one token per row: {self.rows} rows, tokens of shape "
                f"{list(tokens.shape)}"
            )
        check_token_ids(tokens[:, None], self.engine.model.config.vocab)
        self._ahead = None
        self.memory, self._next = self.engine.advance(tokens, self.memory)
        return self._next

    def step_ahead(self, tokens: Sequence[Sequence[int]]) -> StepOutput:
        """Read several tokens per row in one pass: the next token, then drafts of later ones.

        The output has one line per token, the first row's first. `accept` must follow: it keeps the
        first tokens of each row and takes the others back exactly.
        """
        flat = torch.tensor([token for row in tokens for token in row])
        lengths = [len(row) for row in tokens]
        if len(lengths) != self.rows or not all(lengths):
            raise AmorError(f"step_ahead takes at least one token for each of {self.rows} rows")
        check_token_ids(flat[:, None], self.engine.model.config.vocab)
        self._ahead = self.engine.step_ahead(flat, lengths, self.memory), lengths
        return self._ahead[0]

    def accept(self, counts: Sequence[int]) -> StepOutput:
        """Keep the first tokens of every row of the last `step_ahead`, at least one."""
        if self._ahead is None:
            raise AmorError("accept keeps tokens of step_ahead: call step_ahead() before it")
        output, lengths = self._ahead
        starts = [sum(lengths[:r]) for r in range(len(lengths))]
        kept = [start + t for start, n in zip(starts, counts, strict=True) for t in range(n)]
        last = torch.tensor([start + n - 1 for start, n in zip(starts, counts, strict=True)])
        assert isinstance(self.memory, RowMemory)
        self.memory.accept(counts)
        self._ahead = None
        self.engine.count_accepted(output, torch.tensor(kept), self.memory, counts)
        self._next = output.map(lambda t: t[last])
        return self._next

    def fork(self) -> Session:
        """An independent copy."""
        if isinstance(self.memory, State):
            return Session(self.engine, self.memory.fork(), self._next)
        return Session(self.engine, self.memory.select(range(self.rows)), self._next)

    def select(self, rows: Sequence[int]) -> Session:
        """The session of some rows."""
        index = torch.as_tensor(rows, device=self.position.device)
        output = None if self._next is None else self._next.map(lambda t: t[index])
        memory = self.memory.select(rows)
        if isinstance(memory, State):
            memory = replace(memory, memory=self.memory.memory)
        return Session(self.engine, memory, output)

    def join(self, *others: Session) -> Session:
        """This session's rows, then the others'."""
        every = (self, *others)
        first, *rest = (s.memory for s in every)
        memory: State | RowMemory
        if isinstance(first, RowMemory) and all(isinstance(m, RowMemory) for m in rest):
            memory = first.join(*(m for m in rest if isinstance(m, RowMemory)))
        else:
            memory = replace(State.join([s.state for s in every]), memory=first.memory)
        if any(s._next is None for s in every):
            return Session(self.engine, memory, None)
        return Session(self.engine, memory, StepOutput.join([s.next for s in every]))

    def rollback(self, count: int | Tensor) -> None:
        """Take back the last tokens of every row, at most the `memory` of prefill.

        There is no prediction of the next token then.
        """
        if isinstance(self.memory, State):
            self.memory = self.memory.rollback(count, self.engine.model.replay)
        else:
            self.memory.rollback(torch.as_tensor(count).expand(self.rows).tolist())
        self._next = None


class Prefill:
    """Prompts being read, the longest first: a row is done when its prompt ends.

    `read` reads one chunk, so that a long prompt can be read between the steps of other rows.
    """

    def __init__(self, engine: Engine, prompts: Sequence[Sequence[int]], room: int, memory: int):
        """The arguments are those of `Engine.prefill`."""
        self.engine, self.room, self.memory = engine, room, memory
        order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
        self.back = [order.index(i) for i in range(len(prompts))]
        self.prompts = [list(prompts[i]) for i in order]
        self.state = engine.model.start(len(prompts))
        self.start = 0  # tokens of every prompt that have been read
        self.ended: list[Session] = []  # the shortest prompts first

    @property
    def done(self) -> bool:
        """Whether all prompts have been read."""
        return not self.prompts

    @torch.no_grad()
    def read(self, chunk: int) -> None:
        """Read at most `chunk` tokens of every prompt."""
        engine, device, began = self.engine, self.state.position.device, time.perf_counter()
        parts = [p[self.start : self.start + chunk] for p in self.prompts]
        lengths = torch.tensor([len(p) for p in parts], device=device)
        columns = len(parts[0])
        tokens = torch.tensor([p + [0] * (columns - len(p)) for p in parts], device=device)
        valid = (
            None
            if int(lengths.min()) == columns
            else torch.arange(columns, device=device) < lengths[:, None]
        )
        before = engine.passes.rows
        self.state, output = engine.forward(tokens, self.state, "auto", valid)
        engine.stats.prompt_head_rows += engine.passes.rows - before
        engine.stats.prompt_tokens += int(lengths.sum())
        self.start += columns
        self._end(output)
        engine.stats.prompt_seconds += time.perf_counter() - began

    def _end(self, output: StepOutput) -> None:
        """Rows whose prompt has ended become a session; the others go on."""
        going = sum(len(p) > self.start for p in self.prompts)
        if going == len(self.prompts):
            return
        ended = range(going, len(self.prompts))
        state = (self.state.select(ended) if going else self.state).keep_history(self.memory)
        session = Session(self.engine, state, output.map(lambda t: t[going:]), self.room)
        self.ended.insert(0, session)
        if going:
            self.state = self.state.select(range(going))
        self.prompts = self.prompts[:going]

    def finish(self) -> Session:
        """The session of all prompts, in the order they were given."""
        first, *others = self.ended
        session = first.join(*others) if others else first
        return session.select(self.back) if len(self.back) > 1 else session
