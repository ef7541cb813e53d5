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
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from amor.decode.blocks import CompiledBlocks, Residual
from amor.decode.evidence import JointEvidence
from amor.decode.fingerprint import ModelFingerprint
from amor.decode.head import Head, HeadPasses
from amor.decode.policy import Fixed, Follow, Policy
from amor.decode.record import StepProgram
from amor.decode.rows import RowForm, RowMemory
from amor.decode.savings import Savings
from amor.decode.scores import Scorers
from amor.decode.session import Prefill, Session
from amor.decode.step import CompiledModel, why_not_compilable
from amor.decode.step_output import DecodeStats, StepOutput
from amor.decode.tables import RowTables, StateEntries
from amor.errors import AmorError
from amor.form import Part, spec_of
from amor.gates.base import Gate, Verdict
from amor.layout import Layout
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
        self._form: RowForm | None = None  # of rows with memory of their own
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
        self._why, self._recorded, self._form = why, None, None
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
        if chunk < 1:
            raise AmorError(f"chunk is {chunk}; at least 1 token is read at a time")
        reading = self.begin(prompts, room, memory)
        while not reading.done:
            reading.read(chunk)
        return reading.finish()

    def begin(self, prompts: Sequence[Sequence[int]], room: int = 0, memory: int = 0) -> Prefill:
        """Prompts to be read chunk by chunk by whoever calls; arguments as of `prefill`."""
        if not prompts or not all(len(p) for p in prompts):
            raise AmorError(
                "an empty prompt has no last token to go on from; begin it with the tokenizer's "
                "end-of-text token"
            )
        self._recompile_if_changed(full=True)
        return Prefill(self, prompts, room, memory)

    @property
    def own_memory(self) -> bool:
        """Whether steps are compiled as a whole, so that every row has memory of its own."""
        return self.compiled is not None and self.compiled.whole

    def own_rows(self, state: State, room: int = 0) -> State | RowMemory:
        """Copies of the rows of a State, each with memory of its own; or the State, where a step is
        not compiled as a whole."""
        if not self.own_memory or state.steps:
            return state
        if self._form is None:
            self._form = RowForm.of(spec_of(self.model.start(1).parts))
        self.model.check_state(state)
        return RowMemory.of(self._form, state, room, state.memory)

    def _recompile_if_changed(self, full: bool = False) -> None:
        changed = self.fingerprint.changed(full)
        if changed:
            log.info("the model changed (%s): compiling its steps again", changed)
            self.repack()

    def resume(self, state: State) -> Session:
        """A session from a copy of a State; it has no prediction of the next token yet."""
        self._recompile_if_changed(full=True)
        self.model.check_state(state)
        memory = self.own_rows(state)
        return Session(self, state.fork() if memory is state else memory, None)

    @torch.no_grad()
    def step(self, tokens: Tensor, state: State) -> tuple[State, StepOutput]:
        """Read one token per row, [B]; the State is overwritten."""
        self._recompile_if_changed()
        self.model.check_state(state)
        before = self.passes.passes
        if self.compiled is None:
            after, output = self.forward(tokens[:, None], state, "true_sparse")
        else:
            after, output = self._step_state(self.compiled, tokens, state)
        self._count(self.passes.passes - before, state.position, output)
        return after, output

    @torch.no_grad()
    def advance(
        self, tokens: Tensor, memory: State | RowMemory
    ) -> tuple[State | RowMemory, StepOutput]:
        """Read one token per row of a session, [B]; its memory is overwritten."""
        if isinstance(memory, State):
            return self.step(tokens, memory)
        self._recompile_if_changed()
        if self.compiled is None or not self.compiled.whole:  # hooked since, or wrapped
            return self.step(tokens, memory.state())
        before = self.passes.passes
        if memory.memory:
            tables, layout = memory.step_ahead([1] * len(memory))
        else:
            tables, layout = memory.step_in_place()
        output = self._compiled_step(self.compiled, tokens, tables, layout)
        if memory.memory:
            memory.accept([1] * len(memory))
        self._count(self.passes.passes - before, layout.start, output)
        return memory, output

    @torch.no_grad()
    def step_ahead(
        self, tokens: Tensor, lengths: Sequence[int], memory: State | RowMemory
    ) -> StepOutput:
        """Read several tokens per row, [sum of lengths]; `Session.accept` keeps some of them."""
        self._recompile_if_changed()
        if isinstance(memory, State) or self.compiled is None or not self.compiled.whole:
            raise AmorError(f"drafts need steps that are compiled as a whole: {self.path}")
        before = self.passes.passes
        output = self._compiled_step(self.compiled, tokens, *memory.step_ahead(lengths))
        self.stats.head_passes += self.passes.passes - before
        return output

    def count_accepted(
        self, output: StepOutput, kept: Tensor, memory: RowMemory, counts: Sequence[int]
    ) -> None:
        """Count the tokens of a step ahead that were kept; kept: their lines of the output."""
        self.stats.drafted += len(output.fire) - len(counts)
        self.stats.accepted += len(kept) - len(counts)
        positions = [row.position - n + t for row, n in zip(memory.rows, counts) for t in range(n)]
        self._count(0, torch.tensor(positions), output.map(lambda t: t[kept]))

    def _step_state(
        self, compiled: CompiledModel, tokens: Tensor, state: State
    ) -> tuple[State, StepOutput]:
        """A compiled step of a State, as far as its layers and blocks are compiled."""
        layout = state.layout(1, None, None)
        parts = compiled.writable(state, layout)
        overwritten = compiled.overwrites and not state.memory
        if compiled.blocks is None:
            h, _ = compiled.through_layers(tokens, parts, layout)
            mixed = state.read_on([cast(Part, part) for part in parts])
            return self.forward(tokens[:, None], mixed, "true_sparse", residual=h[:, None])
        output = self._compiled_step(compiled, tokens, parts, layout)
        after = [cast(Part, part) for part in parts]
        return state.advance(layout, after, tokens[:, None], overwritten), output

    def _compiled_step(
        self,
        compiled: CompiledModel,
        tokens: Tensor,
        parts: list[StateEntries] | RowTables,
        layout: Layout,
    ) -> StepOutput:
        """Layers, blocks and head, in one native call where the gates allow it."""
        program = self._step_program(compiled)
        if program is not None:
            h, ahead = self.model.embed(tokens).contiguous(), self.policy.speculates()
            output = program(h, parts, layout, ahead)
            self.policy.observe(output.fire.tolist())
            return output
        h, columns = compiled.through_layers(tokens, parts, layout)
        keys, programs = parts[len(self.model.backbone.layers) :], compiled.blocks
        assert programs is not None
        blocks = CompiledBlocks(programs, layout, keys, self.savings.sparse)
        evidence = self._joint(blocks, layout.start, programs.norms.probe_output, self.scorers)
        if columns is None:
            residual = Residual(h, torch.empty(len(keys) + 1, *h.shape))
        else:
            residual = Residual(h, columns, filled=True)
        hidden, verdicts = gated_pass(residual, blocks, self.gates, evidence)
        fire, score = _stacked(verdicts, len(hidden), hidden.device)
        logits, entropy = evidence.output(hidden, verdicts[-1] if verdicts else None)
        return StepOutput(fire, score, logits, entropy)

    def _step_program(self, compiled: CompiledModel) -> StepProgram | None:
        """The whole step as one program; None where the pass runs in Python."""
        savings, gates = self.savings, self.gates
        if not (compiled.whole and savings.joint and savings.sparse):
            return None
        key = tuple((id(gate), gate.version_key()) for gate in gates)
        if self._recorded is None or self._recorded[0] != key:
            self._recorded = key, *compiled.record(gates, self.head)
        return self._recorded[1]

    def _joint(
        self, blocks: Any, positions: Tensor, output: bool, scorers: Scorers | None = None
    ) -> JointEvidence:
        return JointEvidence(
            *(blocks, self.head, self.gates, positions, output, self.savings.joint, scorers)
        )

    def _count(self, passes: int, positions: Tensor, output: StepOutput) -> None:
        """Count a step; positions: [n] of its tokens."""
        stats = self.stats
        stats.steps += 1
        stats.tokens += len(positions)
        stats.head_passes += passes
        if not stats.blocks:
            return
        fires = output.fire.tolist()
        by_block = zip(*fires, strict=True)
        stats.fired = [n + sum(block) for n, block in zip(stats.fired, by_block, strict=True)]
        for fired, position in zip(fires, positions.tolist(), strict=True):
            attended = sum(fired) * (position + 1)
            stats.keys_attended += attended
            stats.keys_skipped += stats.blocks * (position + 1) - attended

    def forward(
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
