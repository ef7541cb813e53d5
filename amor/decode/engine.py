"""The engine: prompts are read in chunks, then one token a row and step; rows join and leave without touching others.

A Session is what is being written: the State of its rows, which it owns, and what is known of each row's next token. Steps run
by compiled programs (amor/decode/step.py) where there is native code for this machine and the layers state their programs,
otherwise by the model's own forward; `engine.path` says which and why. No saving changes a decision (amor/decode/savings.py).
"""

from __future__ import annotations

import copy
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from amor.decode.blocks import BlockPass
from amor.decode.head import Head, Passes
from amor.decode.known import Next, Tally
from amor.decode.policy import Fixed, Follow, Policy
from amor.decode.reader import HeadReader, ReadAhead
from amor.decode.savings import Savings
from amor.decode.scores import Scorers
from amor.decode.seal import Seal
from amor.decode.step import CompiledModel, uncompiled
from amor.errors import AmorError
from amor.form import Part
from amor.gates.base import Gate
from amor.kv import KV
from amor.models.amor import Amor, Output
from amor.models.block import Trace
from amor.models.probe import DirectProbe
from amor.ops import head as head_op
from amor.ops.backends import wishes
from amor.ops.head import reference as all_logits
from amor.ops.product import pack, product
from amor.state import State

log = logging.getLogger("amor")
INSIDE = {"product", "scan", "delta", "conv", "gated_norm", "rowwise", "linear", "head", "attend"}  # a step replaces them
CHUNK = 512  # tokens of a prompt read at a time


class Engine:
    def __init__(
        self,
        model: Amor,
        savings: Savings | None = None,
        weights: str = "float32",  # of amor.ops.product.FORMATS
        policy: Policy | None = None,  # when to run blocks ahead; None: while firings are followed by others
        gates: Sequence[Gate] | None = None,  # one a block; None: the model's own
    ):
        self.model, self.savings, self.weights = model.eval(), savings or Savings(), weights
        self.policy: Policy = policy or (Follow() if self.savings.foresee else Fixed(False))
        self._gates = None if gates is None else list(gates)
        self.tally = Tally(len(model.each_block()))
        self.passes = Passes()
        self.scorers = Scorers()
        self.repack()

    def behind(self, gates: Sequence[Gate], policy: Policy | None = None) -> Engine:
        """The same engine, its packed weights shared, with other gates and counts of its own."""
        other = copy.copy(self)
        other._gates, other.policy, other.tally = list(gates), policy or self.policy, Tally(self.tally.blocks)
        return other

    @property
    def gates(self) -> list[Gate]:
        return [block.gate for block in self.model.each_block()] if self._gates is None else self._gates

    def repack(self) -> None:
        """Compile anew: the model changed since."""
        why = self._uncompiled()
        if why and self.weights != "float32":
            raise AmorError(f"weights {self.weights!r} need compiled steps, which cannot run: {why}; use weights='float32'")
        self.compiled = None if why else CompiledModel(self.model, self.weights)
        if self.compiled is not None and self.weights != "float32" and not self.compiled.whole:
            raise AmorError(f"weights {self.weights!r} cannot serve the whole model: {self.compiled.path}; use weights='float32'")
        self.path = f"the model's forward ({why})" if self.compiled is None else self.compiled.path
        self.head = Head(self.model.head_weight, self.weights)
        self.head.passes = self.passes
        self.seal = Seal(self.model)
        log.info("decode by %s", self.path)

    def _uncompiled(self) -> str:
        """Why no step can be compiled, or nothing."""
        if not self.savings.compiled:
            return "compiled steps are switched off"
        wanted = {
            op: name for op, name in wishes(os.environ.get("AMOR_KERNELS", "")).items() if op in INSIDE and name != "native"
        }
        if wanted:
            asked = ", ".join(f"{op}={name}" for op, name in wanted.items())
            return f"AMOR_KERNELS asks for {asked}, and compiled steps are native"
        return uncompiled(self.model)

    @property
    def nbytes(self) -> int:
        """Bytes of weights held: the model's own and what was packed besides."""
        tensors = [*self.model.parameters(), *self.model.buffers()]
        own = {t.data_ptr() for t in tensors}
        packed = [self.head.matrix, *(self.compiled.matrices() if self.compiled is not None else [])]
        return sum(t.nbytes for t in tensors) + sum(m.nbytes for m in packed if m.weight.data_ptr() not in own)

    @torch.no_grad()
    def prefill(self, prompts: Sequence[Sequence[int]], chunk: int = CHUNK, room: int = 0, memory: int = 0) -> Session:
        """Read prompts, a row each. `room`: tokens to be written, kept free; `memory`: tokens that can be taken back."""
        if not prompts or not all(len(p) for p in prompts):
            raise AmorError("an empty prompt has no last token to go on from; begin it with the tokenizer's end-of-text token")
        if chunk < 1:
            raise AmorError(f"chunk is {chunk}; at least 1 token is read at a time")
        self._current(begins=True)
        began = time.perf_counter()
        order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
        live = _Live(self, [list(prompts[i]) for i in order])
        for start in range(0, len(prompts[order[0]]), chunk):
            live.read(start, chunk)
        back = [order.index(i) for i in range(len(prompts))]
        session = live.finish().select(back) if len(prompts) > 1 else live.finish()
        self.tally.prompt_tokens += sum(len(p) for p in prompts)
        longest = max(len(p) for p in prompts)
        session.state = session.state.reserve(longest + room).keep_history(memory)
        self.tally.prompt_seconds += time.perf_counter() - began
        return session

    def _current(self, begins: bool = False) -> None:
        """Compile anew where the model is not what it was."""
        changed = self.seal.broken(begins)
        if changed:
            log.info("the model changed (%s): steps are compiled anew", changed)
            self.repack()

    def resume(self, state: State) -> Session:
        """A session from a State that was saved or taken elsewhere; it is copied, and knows nothing of the next token yet."""
        self._current(begins=True)
        self.model.admit(state)
        return Session(self, state.fork(), None)

    @torch.no_grad()
    def step(self, tokens: Tensor, state: State) -> tuple[State, Next]:
        """One token a row, [B]; the State is written over."""
        self._current()
        self.model.admit(state)
        before = replace(self.passes)
        if self.compiled is None:
            after, found = self._forward(tokens[:, None], state, "true_sparse")
        else:
            after, found = self._compiled_step(self.compiled, tokens, state)
        self._count(before, state, found)
        return after, found

    def _compiled_step(self, compiled: CompiledModel, tokens: Tensor, state: State) -> tuple[State, Next]:
        layout = state.layout(1, None, None)
        h, parts, read = compiled.through_layers(tokens, state, layout)
        if compiled.blocks is None:
            mixed = state.read_on([*parts, *state.parts[len(parts) :]])
            return self._forward(tokens[:, None], mixed, "true_sparse", residual=h[:, None])
        kept: list[Part] = [{"kv": _keys(part).with_open_slots(layout)} for part in state.parts[len(parts) :]]
        final = self.model.config.blocks.probe == "final"
        reader = HeadReader(
            self.head,
            self.gates,
            lambda h, columns: walk.some_inputs(h, columns),
            self.savings.joint,
            final,
            scorers=self.scorers,
        )
        walk = BlockPass(compiled.blocks, h, read, layout, kept, reader)
        hidden = walk.run(self.savings.sparse, self.policy) if kept else h
        after = state.advance(layout, [*parts, *kept], tokens[:, None], compiled.overwrites and not state.memory)
        shape = len(walk.fires), len(hidden)
        fire = torch.tensor(walk.fires, dtype=torch.bool).view(shape).T
        return after, Next(fire, torch.tensor(walk.scores).view(shape).T, *reader.output(hidden))

    def _count(self, before: Passes, state: State, found: Next) -> None:
        tally, passes = self.tally, self.passes
        tally.steps += 1
        tally.tokens += state.rows
        tally.head_passes += passes.exact - before.exact
        if not tally.blocks:
            return
        fires = found.fire.tolist()
        tally.fired = [count + sum(block) for count, block in zip(tally.fired, zip(*fires, strict=True), strict=True)]
        for fired, position in zip(fires, state.position.tolist(), strict=True):
            met = sum(fired) * (position + 1)
            tally.keys_seen += met
            tally.keys_skipped += tally.blocks * (position + 1) - met

    def _forward(
        self, tokens: Tensor, state: State, compute: str, valid: Tensor | None = None, residual: Tensor | None = None
    ) -> tuple[State, Next]:
        """The model's own forward with the savings switched on, and what it says of each row's next token."""
        savings, gates = self.savings, self.gates
        plain = DirectProbe(self.model, None, self._read)
        reader = None
        if savings.joint and tokens.shape[1] == 1:
            reader = HeadReader(self.head, gates, _inputs_of(self.model), final=self.model.config.blocks.probe == "final")
        out = self.model(
            tokens,
            state,
            valid=valid,
            keep="last" if savings.last else "all",
            probe=plain if reader is None else ReadAhead(reader, plain),
            gates=gates,
            compute=compute if savings.sparse else "full_with_mask",
            residual=residual,
        )
        hidden, traces = _last(out, valid)
        told: tuple[Tensor, Tensor | None]
        if reader is not None and valid is None:
            told = reader.output(hidden)
        else:
            self.passes.exact += 1
            self.passes.rows += len(hidden)
            told = self._logits(hidden), None
        nothing = torch.zeros(len(hidden), 0, device=hidden.device)
        fire, score = (torch.cat([getattr(g, name) for g in traces], 1) if traces else nothing for name in ("fire", "score"))
        return out.state, Next(fire.bool(), score, *told)

    def _logits(self, hidden: Tensor) -> Tensor:
        """[B, V] by the unrounded head. float32 is read where it lies by the product of the steps, the fastest for few rows."""
        weight = self.model.head_weight
        return product(hidden, pack(weight)) if weight.dtype == torch.float32 else self.model.logits(hidden).float()

    def _read(self, x: Tensor, weight: Tensor, *words: Any, **named: Any) -> head_op.HeadStats:
        self.passes.exact += 1
        self.passes.rows += len(x)
        read = head_op.read if self.savings.streamed else all_logits.read
        return read(x, weight, *words, **named)


class Session:
    """Rows being written."""

    def __init__(self, engine: Engine, state: State, found: Next | None):
        self.engine, self.state, self._next = engine, state, found

    @property
    def next(self) -> Next:
        if self._next is None:
            raise AmorError("nothing is known of the next token here: read one with step() first")
        return self._next

    @property
    def rows(self) -> int:
        return self.state.rows

    def step(self, tokens: Tensor | Sequence[int]) -> Next:
        """Read one token a row."""
        tokens = torch.as_tensor(tokens, device=self.state.position.device)
        if tokens.shape != (self.rows,):
            raise AmorError(f"step takes one token a row: {self.rows} rows, tokens of shape {list(tokens.shape)}")
        self.state, self._next = self.engine.step(tokens, self.state)
        return self._next

    def fork(self) -> Session:
        """An independent copy."""
        return Session(self.engine, self.state.fork(), self._next)

    def select(self, rows: Sequence[int]) -> Session:
        """Some rows; the others leave."""
        index = torch.as_tensor(rows, device=self.state.position.device)
        found = None if self._next is None else self._next.map(lambda t: t[index])
        return Session(self.engine, replace(self.state.select(rows), memory=self.state.memory), found)

    def join(self, *others: Session) -> Session:
        """This session's rows, then the others'."""
        every = (self, *others)
        state = replace(State.join([s.state for s in every]), memory=self.state.memory)
        if any(s._next is None for s in every):
            return Session(self.engine, state, None)
        return Session(self.engine, state, Next.join([s.next for s in every]))

    def rollback(self, count: int | Tensor) -> None:
        """Take back the last tokens of every row (as many as the session remembers); the next token is not known then."""
        self.state, self._next = self.state.rollback(count, self.engine.model.replay), None


class _Live:
    """Prompts being read, the longest first: a row leaves when its prompt ends."""

    def __init__(self, engine: Engine, prompts: list[list[int]]):
        self.engine, self.prompts = engine, prompts
        self.session = Session(engine, engine.model.start(len(prompts)), None)
        self.done: list[Session] = []

    def read(self, start: int, chunk: int) -> None:
        engine, device = self.engine, self.session.state.position.device
        parts = [p[start : start + chunk] for p in self.prompts]
        lengths = torch.tensor([len(p) for p in parts], device=device)
        columns = len(parts[0])
        tokens = torch.tensor([p + [0] * (columns - len(p)) for p in parts], device=device)
        valid = None if int(lengths.min()) == columns else torch.arange(columns, device=device) < lengths[:, None]
        before = engine.passes.rows
        after, found = engine._forward(tokens, self.session.state, "auto", valid)
        engine.tally.prompt_head_rows += engine.passes.rows - before
        self.session = Session(engine, after, found)
        self._leave(start + chunk)

    def _leave(self, read: int) -> None:
        going = [i for i, p in enumerate(self.prompts) if len(p) > read]
        if going and len(going) < len(self.prompts):
            self.done.insert(0, self.session.select(range(len(going), len(self.prompts))))
            self.session = self.session.select(going)
            self.prompts = self.prompts[: len(going)]

    def finish(self) -> Session:
        return self.session.join(*self.done) if self.done else self.session


def _keys(part: dict[str, Tensor | KV]) -> KV:
    held = part.get("kv")
    if not isinstance(held, KV):
        raise AmorError("the state holds no keys and values where a gated block wants them; is it of another model?")
    return held


def _inputs_of(model: Amor) -> Callable[[Tensor, list[int]], Tensor]:
    """What the head is asked of a residual if no more block fires: blocks' inputs, and in the last column the output's vector."""

    def inputs(h: Tensor, columns: list[int]) -> Tensor:
        last = model.output_vector(h)
        return torch.stack([last if c == len(model.blocks) else model.block_input(c, h) for c in columns])

    return inputs


def _last(out: Output, valid: Tensor | None) -> tuple[Tensor, list[Trace]]:
    """Hidden vectors [B, D] and decisions [B, 1] of each row's last token; a call keeps them all, or the last block's last."""
    rows = torch.arange(len(out.hidden), device=out.hidden.device)

    def last(t: Tensor) -> Tensor:
        if t.shape[1] == 1 or valid is None:
            return t[:, -1]
        return t[rows, valid.sum(1) - 1]

    traces = [Trace(last(g.score)[:, None], last(g.fire)[:, None], g.threshold) for g in out.gates]
    return last(out.hidden), traces
