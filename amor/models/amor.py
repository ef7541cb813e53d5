"""The whole model: embedding, backbone, gated blocks, head. One forward serves training, prefill and decode.

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
from amor.layout import Layout, align, last_real
from amor.models.backbone import Backbone
from amor.models.block import Block, Trace
from amor.models.measure import Measure, Measured
from amor.models.probe import DirectProbe, Probing
from amor.ops import head
from amor.parts import Cost, Linear, RMSNorm
from amor.state import State


@dataclass(frozen=True)
class Output:
    """What one call found, in the columns the caller used; 0 (and no firing) at pads."""

    hidden: Tensor  # [B, T, D] ready for the head; [B, 1, D] with keep="last"
    state: State
    residual: Tensor  # [B, T, D] what the backbone said, in aligned columns: no gate can change it; as `hidden` without blocks
    gates: tuple[Trace, ...]  # one a block
    loss: Tensor | None = None  # sum of nll times target_weight, differentiable; with targets
    nll: Tensor | None = None  # [B, T] without gradient; with targets
    measured: tuple[Measured | None, ...] = ()  # one a block, None where its gate measures nothing; with `measure`


@dataclass(frozen=True)
class Ways:
    """How the blocks of one call are to run."""

    probe: Probing
    gates: Sequence[Gate]
    compute: str
    keep: Literal["all", "last"]
    measure: Measure | None = None


class Amor(nn.Module):
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
        self._spec: tuple[tuple[object, ...], StateSpec] | None = None  # of its States, and the key it was computed for

    @property
    def head_weight(self) -> Tensor:
        """[V, D] what the head holds."""
        if self.head is None:
            return self.embed.weight
        if type(self.head) is not Linear:
            raise AmorError(
                f"the head was replaced by a {type(self.head).__name__}, but is read by its weight alone, in pieces: "
                "an adapter there would not be heard; leave `head` out of its targets"
            )
        return self.head.weight

    def start(self, batch: int) -> State:
        """The state of rows that have read nothing."""
        device, dtype = self.embed.weight.device, self.embed.weight.dtype
        parts = self.backbone.start(batch, device, dtype) + [b.start(batch, device, dtype) for b in self.each_block()]
        return State(torch.zeros(batch, dtype=torch.long, device=device), tuple(parts))

    def admit(self, state: State) -> None:
        """Refuse a State of another model, with what differs; one that this model made is not looked at again."""
        if self._spec is None or state.spec is not self._spec[1]:
            state.check(self._current_spec())

    def _current_spec(self) -> StateSpec:
        """The specification of its States; computed again after a change of dtype, device or layers."""
        weight = self.embed.weight
        now = (weight.dtype, weight.device, *map(id, self.backbone.layers), *map(id, self.blocks))
        if self._spec is None or self._spec[0] != now:
            self._spec = now, spec_of(self.start(1).parts)
        return self._spec[1]

    def forward(
        self,
        tokens: Tensor,  # [B, T]
        state: State | None = None,  # where to read on from; None: from the beginning
        *,
        valid: Tensor | None = None,  # [B, T] False at pads, wherever they are; None: every token is real
        reset: Tensor | None = None,  # [B, T] True where a packed document begins
        targets: Tensor | None = None,  # [B, T] true next tokens, head.IGNORE where none
        target_weight: Tensor | float | None = None,  # factor of each target's nll in the loss; None: 1 / number of targets
        keep: Literal["all", "last"] = "all",  # "last": hidden of each row's last token only
        probe: Probing | None = None,  # how gates learn what the head says; None: one reading a block
        gates: Sequence[Gate] | None = None,  # one a block, instead of the model's own
        compute: str = "auto",  # which queries are computed: block.COMPUTE
        residual: Tensor | None = None,  # what the backbone said of these very tokens before; its state then stays as it is
        measure: Tensor | None = None,  # [B, S] columns where gates that learn from gains have them measured; needs targets
    ) -> Output:
        tokens, lengths, reset, targets, order = _aligned(tokens, valid, reset, targets)
        if tokens.shape[1] == 0:
            raise AmorError("no tokens: a call reads at least one column; start a text with a beginning-of-text token")
        if state is None:
            state = self.start(len(tokens))
        else:
            self.admit(state)
        if state.rows != len(tokens):
            raise AmorError(f"{len(tokens)} rows of tokens, but the state holds {state.rows} rows")
        layout = state.layout(tokens.shape[1], lengths, reset)
        depth = len(self.backbone.layers)
        parts = list(state.parts[:depth])
        if residual is None:
            last = keep == "last" and not self.blocks
            residual, parts = self.backbone(self.embed(tokens), parts, layout, last)
        chosen = [block.gate for block in self.each_block()] if gates is None else list(gates)
        watch = None if measure is None or not self.measures else Measure(self, measure, targets, layout)
        ways = Ways(probe or DirectProbe(self, targets), chosen, compute, keep, watch)
        h, parts_of_blocks, traces = self._through_blocks(residual, state.parts[depth:], layout, ways)
        after = state.advance(layout, parts + parts_of_blocks, tokens)

        def home(t: Tensor) -> Tensor:
            return t if keep == "last" else _restored(t, layout, order)

        loss = nll = None
        if targets is not None:
            loss, nll = self._loss(h, last_real(targets, layout) if keep == "last" else targets, target_weight)
            nll = home(nll)
        found = tuple(Trace(home(g.score), home(g.fire), g.threshold) for g in traces)
        return Output(home(h), after, residual, found, loss, nll, () if watch is None else watch.found())

    def _through_blocks(
        self, h: Tensor, parts: tuple[Part, ...], layout: Layout, ways: Ways
    ) -> tuple[Tensor, list[Part], list[Trace]]:
        """The residual through the K blocks and the final norm."""
        blocks = self.each_block()
        prenorm = self.config.blocks.first == "prenorm"
        if not prenorm or not blocks:
            h = self.norm_f(h)
        after: list[Part] = []
        traces: list[Trace] = []
        verdict: Verdict | None = None
        for index, (block, part, gate) in enumerate(zip(blocks, parts, ways.gates, strict=True)):
            x = self.block_input(index, h)
            keep = ways.keep if index == len(blocks) - 1 else "all"
            probe = partial(ways.probe, index)
            h, part, verdict = block(h, x, part, layout, gate, probe, ways.compute, keep, verdict, ways.measure)
            after.append(part)
            traces.append(Trace(verdict.score, verdict.fire, gate.threshold))
        return self.output_vector(h), after, traces

    def block_input(self, index: int, h: Tensor) -> Tensor:
        """What block `index` reads of the residual h."""
        norm = self.each_block()[index].norm
        if norm is not None:
            return norm(h)
        return self.norm_f(h) if self.config.blocks.first == "prenorm" else h

    def output_vector(self, h: Tensor) -> Tensor:
        """What the head reads of the residual h behind the blocks."""
        return h if self.final_norm is None else self.final_norm(h)

    def asked(self, h: Tensor, x: Tensor) -> Tensor:
        """What the head is asked about by the gate of a block that reads x of the residual h."""
        return self.output_vector(h) if self.config.blocks.probe == "final" else x

    def _loss(self, h: Tensor, targets: Tensor, target_weight: Tensor | float | None) -> tuple[Tensor, Tensor]:
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
        """[..., D] -> [..., V]: the only place where a logit a token and word is kept."""
        return hidden @ self.head_weight.to(hidden.dtype).T

    def replay(self, tokens: Tensor, state: State, lengths: Tensor) -> State:
        """Read tokens again, `lengths` of each row: what State.rollback calls."""
        columns = torch.arange(tokens.shape[1], device=tokens.device)
        return self(tokens, state, valid=columns < lengths[:, None], keep="last").state

    def probes(self, fire_rate: float = 1.0) -> float:
        """Vectors a token that gates ask the head about, besides the output's.

        One a gate that asks; where all ask about the output's own vector, one a firing.
        """
        asking = sum(1 for block in self.each_block() if block.gate.needs)
        return asking * fire_rate if self.config.blocks.probe == "final" else asking

    def head_passes(self, fire_rate: float) -> float:
        """Passes over the head a token in decode with every saving, where blocks fire together: one for all that is asked and
        the output, and one more at a firing, where a gate had to ask before it."""
        return 1 + (fire_rate if any(block.gate.needs for block in self.each_block()) else 0.0)

    def cost(self, context: int, fire_rate: float = 1.0, heads: float | None = None) -> Cost:
        """One more token in decode. `heads`: passes over the head; by default one a probe and one for the output."""
        blocks = self.each_block()
        passes = self.probes(fire_rate) + 1 if heads is None else heads
        total = self.backbone.cost(context) + Cost(weights=self.norm_f.weight.numel() * (2 if self.final_norm else 1))
        for block in blocks:
            total = total + block.cost(context, fire_rate)
        size = self.head_weight.numel()
        return total + Cost(flops=2 * size, weights=size) * passes + Cost(state_held=8)

    @torch.no_grad()
    def observe(self, scores: list[Tensor]) -> None:
        """Let every gate take in the scores of one optimiser step, [n] each: real tokens of the global batch."""
        for block, seen in zip(self.each_block(), scores, strict=True):
            block.gate.observe_step(seen)

    @torch.no_grad()
    def learn(self, measured: Sequence[Measured | None]) -> None:
        """Let every gate that measures take in the sample of one optimiser step's global batch, one per block."""
        for block, one in zip(self.each_block(), measured, strict=True):
            if one is not None:
                block.gate.learn(one.x, one.value)

    @property
    def measures(self) -> bool:
        """Whether a gate learns from what is measured on a sample of tokens."""
        return any(bool(block.gate.measures) for block in self.each_block())

    def each_block(self) -> list[Block]:
        return list(self.blocks)  # type: ignore[arg-type]


def _aligned(
    tokens: Tensor, valid: Tensor | None, reset: Tensor | None, targets: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Real tokens first in every row; pads become token 0, begin nothing and are not scored."""
    if valid is None:
        return tokens, None, reset, targets, None
    valid = valid.bool()
    if valid.shape != tokens.shape:
        raise AmorError(f"valid is {list(valid.shape)}, tokens are {list(tokens.shape)}; one mark a token is needed")
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
