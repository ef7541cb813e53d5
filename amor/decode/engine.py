"""The decode engine: prompts are read in chunks, then one token per row and step.

A Session is what is being generated: the State of its rows, which it owns, and the prediction of
each row's next token; rows join and leave without touching others. Steps run in native code
(amor/decode/step.py) where this machine has it and the layers state their programs, otherwise by
the model's own forward; `engine.path` names the way and the reason. No saving changes a decision
(amor/decode/savings.py).
"""

from __future__ import annotations

import copy
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from amor.decode.blocks import GatedPass
from amor.decode.fingerprint import ModelFingerprint
from amor.decode.head import Head, HeadPasses
from amor.decode.policy import Fixed, Follow, Policy
from amor.decode.reader import HeadReader, Inputs, ReadAhead
from amor.decode.savings import Savings
from amor.decode.scores import Scorers
from amor.decode.step import CompiledModel, why_not_compilable
from amor.decode.step_output import DecodeStats, StepOutput
from amor.errors import AmorError
from amor.form import Part
from amor.gates.base import Gate
from amor.kv import KV
from amor.layout import check_token_ids
from amor.models.amor import Amor, Output
from amor.models.block import GateTrace
from amor.models.probe import DirectProbe
from amor.ops import head as head_op
from amor.ops.backends import wishes
from amor.ops.head import reference as all_logits
from amor.ops.product import pack, product
from amor.state import State

log = logging.getLogger("amor")
# operators that compiled steps replace
INSIDE = {"product", "scan", "delta", "conv", "gated_norm", "rowwise", "linear", "head", "attend"}
CHUNK = 512  # tokens of a prompt per prefill call


class Engine:
    """A model ready to generate: packed weights, compiled steps, counts of work."""

    def __init__(
        self,
        model: Amor,
        savings: Savings | None = None,
        weights: str = "float32",
        policy: Policy | None = None,
        gates: Sequence[Gate] | None = None,
    ):
        """model: put into evaluation mode.

        savings: which savings to use; None: all.
        weights: format of the matrices, one of amor.ops.product.FORMATS.
        policy: when to speculate; None: while firings are followed by others.
        gates: one per block; None: the model's own.
        """
        self.model, self.savings, self.weights = model.eval(), savings or Savings(), weights
        self.policy: Policy = policy or (Follow() if self.savings.speculate else Fixed(False))
        self._gates = None if gates is None else list(gates)
        self.stats = DecodeStats(len(model.each_block()))
        self.passes = HeadPasses()
        self.scorers = Scorers()
        self.repack()

    def behind(self, gates: Sequence[Gate], policy: Policy | None = None) -> Engine:
        """The same engine, its packed weights shared, with other gates and counts of its own."""
        other = copy.copy(self)
        other._gates, other.policy = list(gates), policy or self.policy
        other.stats = DecodeStats(self.stats.blocks)
        return other

    @property
    def gates(self) -> list[Gate]:
        """The gates that decide, one per block."""
        return (
            [block.gate for block in self.model.each_block()]
            if self._gates is None
            else self._gates
        )

    def repack(self) -> None:
        """Pack and compile the model as it is now."""
        why = self._why_not_compilable()
        if why and self.weights != "float32":
            raise AmorError(
                f"weights {self.weights!r} need compiled steps, which cannot run: {why}; use "
                "weights='float32'"
            )
        self.compiled = None if why else CompiledModel(self.model, self.weights)
        if self.compiled is not None and self.weights != "float32" and not self.compiled.whole:
            raise AmorError(
                f"weights {self.weights!r} cannot serve the whole model: {self.compiled.path}; "
                "use weights='float32'"
            )
        self.path = f"the model's forward ({why})" if self.compiled is None else self.compiled.path
        self.head = Head(self.model.head_weight, self.weights)
        self.head.passes = self.passes
        self.fingerprint = ModelFingerprint(self.model)
        log.info("decode by %s", self.path)

    def _why_not_compilable(self) -> str:
        """Why no step can be compiled, or an empty string."""
        if not self.savings.compiled:
            return "compiled steps are switched off"
        kernels = wishes(os.environ.get("AMOR_KERNELS", "")).items()
        others = [f"{op}={name}" for op, name in kernels if op in INSIDE and name != "native"]
        if others:
            return f"AMOR_KERNELS asks for {', '.join(others)}, and compiled steps are native"
        return why_not_compilable(self.model)

    @property
    def nbytes(self) -> int:
        """Bytes of weights in memory: the model's own and packed copies."""
        tensors = [*self.model.parameters(), *self.model.buffers()]
        own = {t.data_ptr() for t in tensors}
        packed = [self.head.matrix]
        if self.compiled is not None:
            packed += self.compiled.matrices()
        return sum(t.nbytes for t in tensors) + sum(
            m.nbytes for m in packed if m.weight.data_ptr() not in own
        )

    @torch.no_grad()
    def prefill(
        self, prompts: Sequence[Sequence[int]], chunk: int = CHUNK, room: int = 0, memory: int = 0
    ) -> Session:
        """Read prompts, one per row.

        chunk: tokens per call; room: free slots for tokens to be generated; memory: tokens that a
        rollback may take back.
        """
        if not prompts or not all(len(p) for p in prompts):
            raise AmorError(
                "an empty prompt has no last token to go on from; begin it with the tokenizer's "
                "end-of-text token"
            )
        if chunk < 1:
            raise AmorError(f"chunk is {chunk}; at least 1 token is read at a time")
        self._recompile_if_changed(full=True)
        began = time.perf_counter()
        order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
        live = _Prefill(self, [list(prompts[i]) for i in order])
        for start in range(0, len(prompts[order[0]]), chunk):
            live.read(start, chunk)
        back = [order.index(i) for i in range(len(prompts))]
        session = live.finish().select(back) if len(prompts) > 1 else live.finish()
        self.stats.prompt_tokens += sum(len(p) for p in prompts)
        longest = max(len(p) for p in prompts)
        session.state = session.state.reserve(longest + room).keep_history(memory)
        self.stats.prompt_seconds += time.perf_counter() - began
        return session

    def _recompile_if_changed(self, full: bool = False) -> None:
        changed = self.fingerprint.changed(full)
        if changed:
            log.info("the model changed (%s): compiling its steps again", changed)
            self.repack()

    def resume(self, state: State) -> Session:
        """A session from a copy of a State; it has no prediction of the next token yet."""
        self._recompile_if_changed(full=True)
        self.model.check_state(state)
        return Session(self, state.fork(), None)

    @torch.no_grad()
    def step(self, tokens: Tensor, state: State) -> tuple[State, StepOutput]:
        """Read one token per row, [B]; the State is overwritten."""
        self._recompile_if_changed()
        self.model.check_state(state)
        before = self.passes.passes
        if self.compiled is None:
            after, output = self._forward(tokens[:, None], state, "true_sparse")
        else:
            after, output = self._compiled_step(self.compiled, tokens, state)
        self._count(self.passes.passes - before, state, output)
        return after, output

    def _compiled_step(
        self, compiled: CompiledModel, tokens: Tensor, state: State
    ) -> tuple[State, StepOutput]:
        layout = state.layout(1, None, None)
        h, parts, columns = compiled.through_layers(tokens, state, layout)
        if compiled.blocks is None:
            mixed = state.read_on([*parts, *state.parts[len(parts) :]])
            return self._forward(tokens[:, None], mixed, "true_sparse", residual=h[:, None])
        keys: list[Part] = [
            {"kv": _keys(part).with_open_slots(layout)} for part in state.parts[len(parts) :]
        ]
        reader = self._reader(state.rows, lambda h, columns: blocks.some_columns(h, columns))
        blocks = GatedPass(compiled.blocks, h, columns, layout, keys, reader)
        hidden = blocks.run(self.savings.sparse, self.policy) if keys else h
        overwritten = compiled.overwrites and not state.memory
        after = state.advance(layout, [*parts, *keys], tokens[:, None], overwritten)
        shape = len(blocks.fires), len(hidden)
        fire = torch.tensor(blocks.fires, dtype=torch.bool).view(shape).T
        logits, entropy = reader.output(hidden)
        return after, StepOutput(fire, torch.tensor(blocks.scores).view(shape).T, logits, entropy)

    def _reader(self, rows: int, inputs: Inputs) -> HeadReader:
        final = self.model.config.blocks.probe == "final"
        return HeadReader(
            *(self.head, self.gates, inputs, rows, self.savings.joint, final), scorers=self.scorers
        )

    def _count(self, passes: int, state: State, output: StepOutput) -> None:
        stats = self.stats
        stats.steps += 1
        stats.tokens += state.rows
        stats.head_passes += passes
        if not stats.blocks:
            return
        fires = output.fire.tolist()
        by_block = zip(*fires, strict=True)
        stats.fired = [n + sum(block) for n, block in zip(stats.fired, by_block, strict=True)]
        for fired, position in zip(fires, state.position.tolist(), strict=True):
            attended = sum(fired) * (position + 1)
            stats.keys_attended += attended
            stats.keys_skipped += stats.blocks * (position + 1) - attended

    def _forward(
        self,
        tokens: Tensor,
        state: State,
        compute: str,
        valid: Tensor | None = None,
        residual: Tensor | None = None,
    ) -> tuple[State, StepOutput]:
        """The model's own forward with the savings switched on."""
        savings = self.savings
        direct = DirectProbe(self.model, None, self._read)
        reader = None
        if savings.joint and tokens.shape[1] == 1 and valid is None:
            reader = self._reader(len(tokens), _inputs_of(self.model))
        out = self.model(
            tokens,
            state,
            valid=valid,
            keep="last" if savings.last else "all",
            probe=direct if reader is None else ReadAhead(reader, direct),
            gates=self.gates,
            compute=compute if savings.sparse else "full_with_mask",
            residual=residual,
        )
        hidden, traces = _last(out, valid)
        nothing = torch.zeros(len(hidden), 0, device=hidden.device)
        fire, score = (
            torch.cat([getattr(g, name) for g in traces], 1) if traces else nothing
            for name in ("fire", "score")
        )
        entropy = None
        if reader is not None:
            if traces:
                reader.fired(traces[-1].fire[:, 0].tolist())
            logits, entropy = reader.output(hidden)
        else:
            self.passes.add(len(hidden))
            logits = self._logits(hidden)
        return out.state, StepOutput(fire.bool(), score, logits, entropy)

    def _logits(self, hidden: Tensor) -> Tensor:
        """[B, V] by the unrounded head; float32 weights are read in place, as steps read them."""
        weight = self.model.head_weight
        return (
            product(hidden, pack(weight))
            if weight.dtype == torch.float32
            else self.model.logits(hidden).float()
        )

    def _read(self, x: Tensor, weight: Tensor, *args: Any, **options: Any) -> head_op.HeadStats:
        self.passes.add(len(x))
        read = head_op.read if self.savings.streamed else all_logits.read
        return read(x, weight, *args, **options)


class Session:
    """Rows being generated."""

    def __init__(self, engine: Engine, state: State, output: StepOutput | None):
        self.engine, self.state, self._next = engine, state, output

    @property
    def next(self) -> StepOutput:
        """The prediction of each row's next token."""
        if self._next is None:
            raise AmorError("there is no prediction of the next token here: call step() first")
        return self._next

    @property
    def rows(self) -> int:
        """The number of rows."""
        return self.state.rows

    def step(self, tokens: Tensor | Sequence[int]) -> StepOutput:
        """Read one token per row."""
        tokens = torch.as_tensor(tokens, device=self.state.position.device)
        if tokens.shape != (self.rows,):
            raise AmorError(
                f"step takes one token per row: {self.rows} rows, tokens of shape "
                f"{list(tokens.shape)}"
            )
        check_token_ids(tokens[:, None], self.engine.model.config.vocab)
        self.state, self._next = self.engine.step(tokens, self.state)
        return self._next

    def fork(self) -> Session:
        """An independent copy."""
        return Session(self.engine, self.state.fork(), self._next)

    def select(self, rows: Sequence[int]) -> Session:
        """The session of some rows."""
        index = torch.as_tensor(rows, device=self.state.position.device)
        output = None if self._next is None else self._next.map(lambda t: t[index])
        state = replace(self.state.select(rows), memory=self.state.memory)
        return Session(self.engine, state, output)

    def join(self, *others: Session) -> Session:
        """This session's rows, then the others'."""
        every = (self, *others)
        state = replace(State.join([s.state for s in every]), memory=self.state.memory)
        if any(s._next is None for s in every):
            return Session(self.engine, state, None)
        return Session(self.engine, state, StepOutput.join([s.next for s in every]))

    def rollback(self, count: int | Tensor) -> None:
        """Take back the last tokens of every row, at most the `memory` of prefill.

        There is no prediction of the next token then.
        """
        self.state, self._next = self.state.rollback(count, self.engine.model.replay), None


class _Prefill:
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
        valid = (
            None
            if int(lengths.min()) == columns
            else torch.arange(columns, device=device) < lengths[:, None]
        )
        before = engine.passes.rows
        after, output = engine._forward(tokens, self.session.state, "auto", valid)
        engine.stats.prompt_head_rows += engine.passes.rows - before
        self.session = Session(engine, after, output)
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
    kv = part.get("kv")
    if not isinstance(kv, KV):
        raise AmorError(
            "the state has no keys and values for a gated block; is it of another model?"
        )
    return kv


def _inputs_of(model: Amor) -> Inputs:
    """Columns of a residual if no further block fires: blocks' inputs, then the output vector."""

    def inputs(h: Tensor, columns: list[int]) -> Tensor:
        last = model.output_vector(h)
        return torch.stack(
            [last if c == len(model.blocks) else model.block_input(c, h) for c in columns]
        )

    return inputs


def _last(out: Output, valid: Tensor | None) -> tuple[Tensor, list[GateTrace]]:
    """Hidden vectors [B, D] and decisions [B, 1] of each row's last token."""
    rows = torch.arange(len(out.hidden), device=out.hidden.device)

    def last(t: Tensor) -> Tensor:
        if t.shape[1] == 1 or valid is None:
            return t[:, -1]
        return t[rows, valid.sum(1) - 1]

    traces = [
        GateTrace(last(g.score)[:, None], last(g.fire)[:, None], g.threshold) for g in out.gates
    ]
    return last(out.hidden), traces
