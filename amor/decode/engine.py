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

from amor.decode.blocks import CompiledBlocks, Residual, SpeculativeBlocks
from amor.decode.evidence import JointEvidence
from amor.decode.fingerprint import ModelFingerprint
from amor.decode.head import Head, HeadPasses
from amor.decode.policy import Fixed, Follow, Policy
from amor.decode.record import StepProgram
from amor.decode.savings import Savings
from amor.decode.scores import Scorers
from amor.decode.step import CompiledModel, why_not_compilable
from amor.decode.step_output import DecodeStats, StepOutput
from amor.errors import AmorError
from amor.gates.base import Gate, Verdict
from amor.layout import Layout, check_token_ids
from amor.models.amor import Amor, Output
from amor.models.block import TorchBlocks
from amor.models.evidence import HeadEvidence
from amor.models.gated import EvidenceSource, PassOptions, gated_pass
from amor.ops import head as head_op
from amor.ops.backends import wishes
from amor.ops.head import reference as all_logits
from amor.ops.product import pack, product
from amor.state import State

log = logging.getLogger("amor")
# operators that compiled steps replace
INSIDE = {"product", "scan", "delta", "conv", "gated_norm", "rowwise", "linear", "head", "attend"}
CHUNK = 512  # tokens of a prompt per prefill call


def kernels_not_native() -> str:
    """What AMOR_KERNELS asks for in place of compiled steps, or an empty string."""
    kernels = wishes(os.environ.get("AMOR_KERNELS", "")).items()
    others = [f"{op}={name}" for op, name in kernels if op in INSIDE and name != "native"]
    asked = f"AMOR_KERNELS asks for {', '.join(others)}"
    return f"{asked}, and compiled steps are native" if others else ""


class Engine:
    """A model ready to generate: packed weights, compiled steps, counts of work.

        engine = amor.Engine(model)
        session = engine.prefill([[1, 2, 3], [4, 5]])       # prompts as token ids, one per row
        for _ in range(20):
            session.step(session.next.greedy_token)         # one token per row
        engine.stats.fire_rates                             # per block, fraction of tokens

    `engine.path` names how steps run and why. `amor.generate` does all of this from text to text.
    """

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
        # version keys of the gates, the step behind them as one program (or None), and why not
        self._recorded: tuple[tuple[object, ...], StepProgram | None, str] | None = None
        self.repack()

    def behind(self, gates: Sequence[Gate], policy: Policy | None = None) -> Engine:
        """The same engine, its packed weights shared, with other gates and counts of its own."""
        other = copy.copy(self)
        other._gates, other.policy = list(gates), policy or self.policy
        other.stats, other._recorded = DecodeStats(self.stats.blocks), None
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
        self._why, self._recorded = why, None
        self.head = Head(self.model.head_weight, self.weights)
        self.head.passes = self.passes
        self.fingerprint = ModelFingerprint(self.model)
        log.info("decode by %s", self.path)

    @property
    def path(self) -> str:
        """How steps run: native code as far as it goes, and why not further."""
        if self.compiled is None:
            return f"the model's forward ({self._why})"
        self._step_program(self.compiled)
        if self._recorded is None or not self._recorded[2]:
            return self.compiled.path
        return f"{self.compiled.path}, gates in Python ({self._recorded[2]})"

    def _why_not_compilable(self) -> str:
        """Why no step can be compiled, or an empty string."""
        if not self.savings.compiled:
            return "compiled steps are switched off"
        return kernels_not_native() or why_not_compilable(self.model)

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
        program = self._step_program(compiled)
        if program is not None:
            return self._native_step(compiled, program, tokens, state, layout)
        h, parts, columns = compiled.through_layers(tokens, state, layout)
        if compiled.blocks is None:
            mixed = state.read_on([*parts, *state.parts[len(parts) :]])
            return self._forward(tokens[:, None], mixed, "true_sparse", residual=h[:, None])
        keys = compiled.writable(state, layout, range(len(parts), len(state.parts)))
        programs = compiled.blocks
        blocks = CompiledBlocks(programs, layout, keys, self.savings.sparse)
        evidence = self._joint(blocks, state.position, programs.norms.probe_output, self.scorers)
        if columns is None:
            residual = Residual(h, torch.empty(len(keys) + 1, *h.shape))
        else:
            residual = Residual(h, columns, filled=True)
        speculative = SpeculativeBlocks(blocks, evidence, self.policy)
        hidden, verdicts = gated_pass(residual, speculative, self.gates, evidence)
        fire, score = _stacked(verdicts, len(hidden), hidden.device)
        self.policy.observe(fire.T.tolist())
        overwritten = compiled.overwrites and not state.memory
        after = state.advance(layout, [*parts, *keys], tokens[:, None], overwritten)
        logits, entropy = evidence.output(hidden, verdicts[-1] if verdicts else None)
        return after, StepOutput(fire, score, logits, entropy)

    def _step_program(self, compiled: CompiledModel) -> StepProgram | None:
        """The whole step as one program; None where the pass runs in Python."""
        savings, gates = self.savings, self.gates
        if not (compiled.whole and savings.joint and savings.sparse) or self.policy.speculates():
            return None
        key = tuple((id(gate), gate.version_key()) for gate in gates)
        if self._recorded is None or self._recorded[0] != key:
            self._recorded = key, *compiled.record(gates, self.head)
        return self._recorded[1]

    def _native_step(
        self,
        compiled: CompiledModel,
        program: StepProgram,
        tokens: Tensor,
        state: State,
        layout: Layout,
    ) -> tuple[State, StepOutput]:
        parts = compiled.writable(state, layout, range(len(state.parts)))
        output = program(self.model.embed(tokens).contiguous(), parts, layout)
        self.policy.observe(output.fire.T.tolist())
        overwritten = compiled.overwrites and not state.memory
        return state.advance(layout, parts, tokens[:, None], overwritten), output

    def _joint(
        self, blocks: Any, positions: Tensor, output: bool, scorers: Scorers | None = None
    ) -> JointEvidence:
        return JointEvidence(
            *(blocks, self.head, self.gates, positions, output, self.savings.joint, scorers)
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
        joint: list[JointEvidence] = []

        def evidence(blocks: TorchBlocks, targets: Tensor | None) -> EvidenceSource:
            if savings.joint and tokens.shape[1] == 1 and valid is None:
                output = blocks.norms.probe_output
                joint.append(self._joint(blocks, blocks.layout.start, output))
                return joint[0]
            return HeadEvidence(blocks, self.model.head_weight, targets, self._read)

        out = self.model(
            tokens,
            state,
            valid=valid,
            keep="last" if savings.last else "all",
            options=PassOptions(
                gates=self.gates,
                compute=compute if savings.sparse else "full_with_mask",
                residual=residual,
                evidence=evidence,
            ),
        )
        hidden, traces = _last(out, valid)
        fire, score = _stacked(traces, len(hidden), hidden.device)
        if joint:
            logits, entropy = joint[0].output(hidden, traces[-1] if traces else None)
            return out.state, StepOutput(fire, score, logits, entropy)
        self.passes.add(len(hidden))
        return out.state, StepOutput(fire, score, self._logits(hidden))

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


def _last(out: Output, valid: Tensor | None) -> tuple[Tensor, list[Verdict]]:
    """Hidden vectors [B, D] and decisions [B] of each row's last token."""
    rows = torch.arange(len(out.hidden), device=out.hidden.device)

    def last(t: Tensor) -> Tensor:
        if t.shape[1] == 1 or valid is None:
            return t[:, -1]
        return t[rows, valid.sum(1) - 1]

    return last(out.hidden), [Verdict(last(g.fire), last(g.score)) for g in out.gates]


def _stacked(verdicts: Sequence[Verdict], rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Decisions and scores [B, K]."""
    if not verdicts:
        nothing = torch.zeros(rows, 0, device=device)
        return nothing.bool(), nothing
    return torch.stack([v.fire for v in verdicts], 1), torch.stack([v.score for v in verdicts], 1)
