"""The whole model: embedding, backbone, gated blocks, head. One forward serves training, prefill
and decode.

    Embed -> layers x N -> norm_f -> block x K -> final norm -> head

The head is the embedding read the other way round, or (config.tied = false) has weights of its own.
The three uses differ only in how many tokens are handed in and which state comes along.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from amor.config import Config
from amor.errors import AmorError
from amor.form import Part, StateSpec, spec_of
from amor.gates.base import Gate, Verdict
from amor.layout import Layout, align, check_token_ids, last_real
from amor.models.backbone import Backbone
from amor.models.block import Block, GateTrace
from amor.models.measure import Measure, Measured
from amor.models.probe import DirectProbe, Probing
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
    # one per block, None where its gate measures nothing; with `measure`
    measured: tuple[Measured | None, ...] = ()


@dataclass(frozen=True)
class BlockOptions:
    """How the blocks of one call run; fields as in `Amor.forward`."""

    probe: Probing
    gates: Sequence[Gate]
    compute: str
    keep: Literal["all", "last"]
    measure: Measure | None = None


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
        normed = config.blocks.count and config.blocks.final == "norm"
        self.final_norm = RMSNorm(config.width, config.eps("final_norm")) if normed else None
        self.head = None if config.tied else Linear(config.width, config.vocab)
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
        probe: Probing | None = None,
        gates: Sequence[Gate] | None = None,
        compute: str = "auto",
        residual: Tensor | None = None,
        measure: Tensor | None = None,
    ) -> Output:
        """Read tokens [B, T] from a State.

        state: where to continue; None: from the beginning.
        valid: [B, T] False at pads, wherever they are; None: every token is real.
        reset: [B, T] True where a packed document begins.
        targets: [B, T] true next tokens, head.IGNORE where none; sets `loss` and `nll`.
        target_weight: factor of each target's nll in the loss; None: 1 / number of targets.
        keep: "last" returns the hidden vector of each row's last token only.
        probe: where gates get their evidence; None: one reading of the head per block.
        gates: one per block, instead of the model's own.
        compute: which queries are computed, one of block.COMPUTE.
        residual: `Output.residual` of an earlier call with the same tokens; skips the backbone,
            whose state then stays as it is.
        measure: [B, S] columns where gains are measured for gates that learn them; needs targets.
        """
        check_token_ids(tokens, self.config.vocab, valid)
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
        if residual is None:
            last = keep == "last" and not self.blocks
            residual, parts = self.backbone(self.embed(tokens), parts, layout, last)
        chosen = [block.gate for block in self.each_block()] if gates is None else list(gates)
        observer = None
        if measure is not None and self.measures:
            observer = Measure(self, measure, targets, layout)
        options = BlockOptions(probe or DirectProbe(self, targets), chosen, compute, keep, observer)
        h, parts_of_blocks, traces = self._through_blocks(
            residual, state.parts[depth:], layout, options
        )
        after = state.advance(layout, parts + parts_of_blocks, tokens)

        def to_caller_order(t: Tensor) -> Tensor:
            return t if keep == "last" else _restored(t, layout, order)

        loss = nll = None
        if targets is not None:
            loss, nll = self._loss(
                h, last_real(targets, layout) if keep == "last" else targets, target_weight
            )
            nll = to_caller_order(nll)
        decisions = tuple(
            GateTrace(to_caller_order(g.score), to_caller_order(g.fire), g.threshold)
            for g in traces
        )
        measured = () if observer is None else observer.results()
        return Output(to_caller_order(h), after, residual, decisions, loss, nll, measured)

    def _through_blocks(
        self, h: Tensor, parts: tuple[Part, ...], layout: Layout, options: BlockOptions
    ) -> tuple[Tensor, list[Part], list[GateTrace]]:
        """The residual through the K blocks and the final norm."""
        blocks = self.each_block()
        prenorm = self.config.blocks.first == "prenorm"
        if not prenorm or not blocks:
            h = self.norm_f(h)
        after: list[Part] = []
        traces: list[GateTrace] = []
        verdict: Verdict | None = None
        for index, (block, part, gate) in enumerate(zip(blocks, parts, options.gates, strict=True)):
            x = self.block_input(index, h)
            keep = options.keep if index == len(blocks) - 1 else "all"
            probe = partial(options.probe, index)
            h, part, verdict = block(
                h, x, part, layout, gate, probe, options.compute, keep, verdict, options.measure
            )
            after.append(part)
            traces.append(GateTrace(verdict.score, verdict.fire, gate.threshold))
        return self.output_vector(h), after, traces

    def block_input(self, index: int, h: Tensor) -> Tensor:
        """The input of block `index`, from the residual h."""
        norm = self.each_block()[index].norm
        if norm is not None:
            return norm(h)
        return self.norm_f(h) if self.config.blocks.first == "prenorm" else h

    def output_vector(self, h: Tensor) -> Tensor:
        """The vector the head reads behind the blocks, from the residual h."""
        return h if self.final_norm is None else self.final_norm(h)

    def probe_vector(self, h: Tensor, x: Tensor) -> Tensor:
        """The vector the head reads for a block's gate, from the residual h and its input x."""
        return self.output_vector(h) if self.config.blocks.probe == "final" else x

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
        return readers * fire_rate if self.config.blocks.probe == "final" else readers

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
    def observe(self, scores: list[Tensor]) -> None:
        """Update the statistics of every gate by the scores of one optimiser step.

        scores: per block, [n] of the real tokens of the global batch.
        """
        for block, values in zip(self.each_block(), scores, strict=True):
            block.gate.observe_step(values)

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
