"""The whole model: embedding, backbone, gated blocks, head. One forward serves training, prefill
and decode.

    Embed -> layers x N -> norm_f -> block x K -> final norm -> head

The head is the embedding read the other way round, or (config.tied = false) has weights of its own.
The three uses differ only in how many tokens are handed in and which state comes along.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from amor.config import Config
from amor.errors import AmorError
from amor.form import StateSpec, spec_of
from amor.gates.base import Adaptive
from amor.layout import Layout, align, check_token_ids, last_real
from amor.models.backbone import Backbone
from amor.models.block import Block, GateTrace, TorchBlocks
from amor.models.evidence import HeadEvidence
from amor.models.gated import EvidenceSource, Norms, PassOptions, gated_pass, has_final_norm
from amor.models.measure import Measure, Measured
from amor.ops import head
from amor.parts import Cost, Linear, RMSNorm
from amor.state import State


@dataclass(frozen=True)
class Output:
    """The result of one call, in the caller's columns; 0 (and no firing) at pads."""

    hidden: Tensor  # [B, T, D] ready for the head; [B, 1, D] with keep="last"
    state: State
    # [B, T, D] output of the backbone, before any gate, in aligned columns; `hidden` without blocks
    residual: Tensor
    gates: tuple[GateTrace, ...]  # one per block
    loss: Tensor | None = None  # sum of nll times target_weight, differentiable; with targets
    nll: Tensor | None = None  # [B, T] without gradient; with targets
    # one per block, None where its gate measures nothing; with `options.measure`
    measured: tuple[Measured | None, ...] = ()
    valid: Tensor | None = None  # [B, T] False at pads, as given


log = logging.getLogger("amor")
PLAIN = PassOptions()
UNOBSERVED = 50  # training forwards without an update of gate statistics, before a warning


class Amor(nn.Module):
    """A language model: a backbone of layers, with gated attention blocks behind it."""

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab, config.width)
        self.backbone = Backbone(config)
        self.norm_f = RMSNorm(config.width, config.eps("norm_f"))
        self.blocks = nn.ModuleList()
        for k in range(config.blocks.count):
            self.blocks.append(Block(config, k, self.each_block()[0].gate if k else None))
        normed = has_final_norm(config.blocks)
        self.final_norm = RMSNorm(config.width, config.eps("final_norm")) if normed else None
        self.head = None if config.tied else Linear(config.width, config.vocab)
        self._unobserved: int | None = 0  # training forwards; None after a call of `observe`
        self._spec: tuple[tuple[object, ...], StateSpec] | None = (
            None  # of its States, and their key
        )

    @property
    def head_weight(self) -> Tensor:
        """[V, D], the embedding's where the head is tied."""
        if self.head is None:
            return self.embed.weight
        if type(self.head) is not Linear:
            raise AmorError(
                f"the head was replaced by a {type(self.head).__name__}, but its weight is read "
                "directly, in "
                "pieces: an adapter there would have no effect; leave `head` out of its targets"
            )
        return self.head.weight

    def start(self, batch: int) -> State:
        """The State of `batch` rows that have read nothing."""
        device, dtype = self.embed.weight.device, self.embed.weight.dtype
        parts = self.backbone.start(batch, device, dtype) + [
            b.start(batch, device, dtype) for b in self.each_block()
        ]
        return State(torch.zeros(batch, dtype=torch.long, device=device), tuple(parts))

    def check_state(self, state: State) -> None:
        """Refuse a State of another model, naming what differs; its own are not checked again."""
        if self._spec is None or state.spec is not self._spec[1]:
            state.check(self._current_spec())

    def _current_spec(self) -> StateSpec:
        """The specification of its States; computed again after a change of dtype, device or
        layers.
        """
        weight = self.embed.weight
        now = (weight.dtype, weight.device, *map(id, self.backbone.layers), *map(id, self.blocks))
        if self._spec is None or self._spec[0] != now:
            self._spec = now, spec_of(self.start(1).parts)
        return self._spec[1]

    def forward(
        self,
        tokens: Tensor,
        state: State | None = None,
        *,
        valid: Tensor | None = None,
        reset: Tensor | None = None,
        targets: Tensor | None = None,
        target_weight: Tensor | float | None = None,
        keep: Literal["all", "last"] = "all",
        options: PassOptions = PLAIN,
    ) -> Output:
        """Read tokens [B, T] from a State.

        In training mode, gates without statistics take those of this batch before they decide; from
        then on `observe` keeps them up to date, once per optimiser step:

            out = model(x, targets=y)
            out.loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            model.observe(out)

        tokens: [B, T] token ids.
        state: where to continue; None: from the beginning. Arguments after it are by name.
        valid: [B, T] False at pads, wherever they are; None: every token is real.
        reset: [B, T] True where a packed document begins.
        targets: [B, T] true next tokens, head.IGNORE where none; sets `loss` and `nll`.
        target_weight: factor of each target's nll in the loss; None: 1 / number of targets.
        keep: "last" returns the hidden vector of each row's last token only.
        options: other gates, gains to measure and the like, for analysis and decode.
        """
        check_token_ids(tokens, self.config.vocab, valid)
        self._count_training_forward()
        tokens, lengths, reset, targets, order = _aligned(tokens, valid, reset, targets)
        if tokens.shape[1] == 0:
            raise AmorError(
                "no tokens: a call reads at least one column; start a text with a "
                "beginning-of-text token"
            )
        if state is None:
            state = self.start(len(tokens))
        else:
            self.check_state(state)
        if state.rows != len(tokens):
            raise AmorError(f"{len(tokens)} rows of tokens, but the state holds {state.rows} rows")
        layout = state.layout(tokens.shape[1], lengths, reset)
        depth = len(self.backbone.layers)
        parts = list(state.parts[:depth])
        residual = options.residual
        if residual is None:
            last = keep == "last" and not self.blocks
            residual, parts = self.backbone(self.embed(tokens), parts, layout, last)
        blocks = TorchBlocks(
            *(self.norms, self.each_block(), state.parts[depth:], layout, options.compute, keep)
        )
        measure = None
        if options.measure is not None and self.measures:
            measure = Measure(blocks, options.measure, targets, self.head_weight)
        gates = options.gates
        if gates is None:
            gates = [block.gate for block in self.each_block()]
        if options.evidence is None:
            evidence: EvidenceSource = HeadEvidence(blocks, self.head_weight, targets)
        else:
            evidence = options.evidence(blocks, targets)
        observers = () if measure is None else (measure,)
        h, verdicts = gated_pass(residual, blocks, gates, evidence, observers)
        after = state.advance(layout, parts + blocks.parts, tokens)

        def to_caller_order(t: Tensor) -> Tensor:
            return t if keep == "last" else _restored(t, layout, order)

        loss = nll = None
        if targets is not None:
            loss, nll = self._loss(
                h, last_real(targets, layout) if keep == "last" else targets, target_weight
            )
            nll = to_caller_order(nll)
        decisions = tuple(
            GateTrace(to_caller_order(v.score), to_caller_order(v.fire), gate.threshold)
            for v, gate in zip(verdicts, gates, strict=True)
        )
        measured = () if measure is None else measure.results()
        return Output(to_caller_order(h), after, residual, decisions, loss, nll, measured, valid)

    @property
    def norms(self) -> Norms[RMSNorm]:
        """The norms around the blocks, and which vectors are probed."""
        inputs = [block.norm for block in self.each_block()]
        return Norms.of(self.config.blocks, self.norm_f, inputs, self.final_norm)

    def _loss(
        self, h: Tensor, targets: Tensor, target_weight: Tensor | float | None
    ) -> tuple[Tensor, Tensor]:
        """The weighted sum of nll over targets, and nll per token [B, T]."""
        flat = targets.flatten()
        if target_weight is None:
            target_weight = 1 / (flat != head.IGNORE).sum().clamp(min=1)
        target_weight = torch.as_tensor(target_weight, dtype=torch.float32, device=h.device)
        target_weight = target_weight.expand(targets.shape).flatten()
        loss, reading = head.loss(h.flatten(0, 1), self.head_weight, flat, target_weight)
        assert reading.nll is not None
        return loss, reading.nll.view_as(targets)

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., D] -> [..., V]: the only place where all logits of every token are kept."""
        return hidden @ self.head_weight.to(hidden.dtype).T

    def replay(self, tokens: Tensor, state: State, lengths: Tensor) -> State:
        """Read tokens again, `lengths` of each row; called by State.rollback."""
        columns = torch.arange(tokens.shape[1], device=tokens.device)
        return self(tokens, state, valid=columns < lengths[:, None], keep="last").state

    def probes(self, fire_rate: float = 1.0) -> float:
        """Vectors per token that the head reads for gates, besides the output vector.

        One per gate that needs the head; where gates read the output vector, one per firing.
        """
        readers = sum(1 for block in self.each_block() if block.gate.needs)
        return readers * fire_rate if self.norms.probe_output else readers

    def head_passes(self, fire_rate: float) -> float:
        """Passes over the head per token in decode with every saving, where blocks fire together.

        One for all gates and the output, and one more at a firing if a gate needs the head.
        """
        return 1 + (fire_rate if any(block.gate.needs for block in self.each_block()) else 0.0)

    def cost(self, context: int, fire_rate: float = 1.0, heads: float | None = None) -> Cost:
        """One more token in decode.

        heads: passes over the head; None: one per probe and one for the output.
        """
        blocks = self.each_block()
        passes = self.probes(fire_rate) + 1 if heads is None else heads
        total = self.backbone.cost(context) + Cost(
            weights=self.norm_f.weight.numel() * (2 if self.final_norm else 1)
        )
        for block in blocks:
            total = total + block.cost(context, fire_rate)
        size = self.head_weight.numel()
        return total + Cost(flops=2 * size, weights=size) * passes + Cost(state_held=8)

    @torch.no_grad()
    def observe(self, scores: Output | Sequence[Tensor]) -> None:
        """Update the statistics of every gate, so that thresholds follow training.

        Call it once per optimiser step, in a training loop of your own too: `model.observe(out)`.
        scores: the Output of the step's forward; or, with several micro-batches or ranks, per block
        the scores [n] of the real tokens of the global batch.
        """
        self._unobserved = None
        if isinstance(scores, Output):
            self.learn(scores.measured or [None] * len(self.blocks))
            valid, last = scores.valid, scores.hidden.shape[1] == 1
            scores = [g.score if valid is None or last else g.score[valid] for g in scores.gates]
        for block, values in zip(self.each_block(), scores, strict=True):
            block.gate.observe_step(values)

    def _count_training_forward(self) -> None:
        """Warn once where a training loop never calls `observe`."""
        if self._unobserved is None or not (self.training and torch.is_grad_enabled()):
            return
        self._unobserved += 1
        gates = (block.gate for block in self.each_block())
        if self._unobserved == UNOBSERVED and any(
            isinstance(gate, Adaptive) and not gate.updates_in_forward for gate in gates
        ):
            log.warning(
                "%d training forwards without model.observe(out): the thresholds of the gates stay "
                "at the statistics of the first batch; call it once per optimiser step",
                UNOBSERVED,
            )

    @torch.no_grad()
    def learn(self, measured: Sequence[Measured | None]) -> None:
        """Let gates that measure learn from the sample of one optimiser step, one per block."""
        for block, one in zip(self.each_block(), measured, strict=True):
            if one is not None:
                block.gate.learn(one.x, one.value)

    @property
    def measures(self) -> bool:
        """Whether a gate learns from what is measured on a sample of tokens."""
        return any(bool(block.gate.measures) for block in self.each_block())

    def each_block(self) -> list[Block]:
        """The gated blocks, typed."""
        return list(self.blocks)  # type: ignore[arg-type]


def _aligned(
    tokens: Tensor, valid: Tensor | None, reset: Tensor | None, targets: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Real tokens first in every row; pads become token 0, begin nothing and are not scored."""
    if valid is None:
        return tokens, None, reset, targets, None
    valid = valid.bool()
    if valid.shape != tokens.shape:
        raise AmorError(
            f"valid is {list(valid.shape)}, tokens are {list(tokens.shape)}; one mark per token "
            "is needed"
        )
    if bool(valid.all()):
        return tokens, None, reset, targets, None
    lengths, order = align(valid)
    tokens = tokens.masked_fill(~valid, 0)
    reset = None if reset is None else reset & valid
    targets = None if targets is None else targets.masked_fill(~valid, head.IGNORE)
    if order is None:
        return tokens, lengths, reset, targets, None
    moved = [None if t is None else t.gather(1, order) for t in (tokens, reset, targets)]
    assert moved[0] is not None
    return moved[0], lengths, moved[1], moved[2], order


def _restored(t: Tensor, layout: Layout, order: Tensor | None) -> Tensor:
    """Back to the caller's columns, 0 at pads."""
    if layout.valid is None:
        return t
    marks = layout.valid.view(layout.valid.shape + (1,) * (t.ndim - 2))
    t = torch.where(marks, t, torch.zeros((), dtype=t.dtype, device=t.device))
    if order is None:
        return t
    index = torch.argsort(order, dim=1).view(order.shape + (1,) * (t.ndim - 2))
    return t.gather(1, index.expand_as(t))
