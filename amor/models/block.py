"""The AMOR block: attention on the residual stream, run only where the gate fires.

    x = h or RMSNorm(h)      fire = gate(x)
    h <- h + fire * sigmoid(alpha) * W_O SDPA(RoPE(W_Q x), RoPE(W_K x), W_V x)

Keys and values are computed and kept for every token. Queries are computed for all and masked
(`full_with_mask`), or only where the gate fires (`true_sparse`); both give the same numbers, and
`auto` takes the faster, in training too.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from amor.config import Config
from amor.errors import AmorError, nearest
from amor.form import Part
from amor.gates.base import Evidence, Gate, Verdict, find_gate
from amor.gates.once import Follower
from amor.kv import KV
from amor.layout import Layout, last_real
from amor.mixers.attention import Attention, AttentionOptions
from amor.ops import attend
from amor.parts import Cost, RMSNorm, SwiGLU
from amor.program import Program, Vector

# firing rate above which computing all queries is faster: docs/benchmarks.md has the measurement
DENSE_ABOVE = 0.8
COMPUTE = ("auto", "full_with_mask", "true_sparse")


@dataclass(frozen=True)
class GateTrace:
    """The decisions of one block's gate, [B, T] each; pads never fire and score 0."""

    score: Tensor
    fire: Tensor
    threshold: Tensor


Place = tuple[Tensor, Tensor]  # row and column of each of some tokens
# residual and x [B, T, D], the gate's needs, the residual closed and opened, the verdict of the
# block before -> evidence
ReadEvidence = Callable[
    [Tensor, Tensor, Layout, frozenset[str], Callable[[], tuple[Tensor, Tensor]], Verdict | None],
    Evidence,
]


class BlockObserver(Protocol):
    """Records what a block would do to tokens of its choice."""

    def __call__(
        self, h: Tensor, x: Tensor, fired: Callable[[Tensor, Tensor, Place], Tensor]
    ) -> None:
        """h, x: the residual and the block's input, [B, T, D].

        fired: from h and x [n, D] of some tokens and their places to their residual after firing.
        """


class Block(nn.Module):
    """Attention behind a gate."""

    def __init__(self, config: Config, index: int, first: Gate | None = None):
        """first: the gate of block 0; None for that block itself."""
        super().__init__()
        blocks, eps = config.blocks, config.eps("block")
        # block 0 takes its input as it comes: norm_f's output, or (prenorm) it is normed by norm_f
        # itself
        self.norm = RMSNorm(config.width, eps) if index else None
        self.attention = Attention(
            config.width, AttentionOptions(blocks.head_size, blocks.rope_theta), eps
        )
        self.alpha = nn.Parameter(torch.zeros(config.width))  # before the sigmoid
        self.alpha_floor = blocks.alpha_floor
        self.gate = gate_of(config, index, first)
        self.mlp_norm = RMSNorm(config.width, eps) if blocks.mlp else None
        self.mlp = SwiGLU(config.width, config.d_ff) if blocks.mlp else None

    def start(self, batch: int, device: torch.device, dtype: torch.dtype) -> Part:
        """The block's part of a fresh State."""
        return self.attention.start(batch, device, dtype)

    def forward(
        self,
        h: Tensor,
        x: Tensor,
        state: Part,
        layout: Layout,
        gate: Gate,
        probe: ReadEvidence,
        compute: str = "auto",
        keep: str = "all",
        before: Verdict | None = None,
        observer: BlockObserver | None = None,
    ) -> tuple[Tensor, Part, Verdict]:
        """One block over all tokens of a call.

        h: [B, T, D] the residual; x: the block's input, h or a norm of it.
        gate: decides instead of the block's own; before: the verdict of the block before.
        keep: "last" computes only each row's last token.
        Returns the residual after the block, its part of the State, and the verdict.
        """
        kv = state["kv"]
        assert isinstance(kv, KV)
        k, v, after = self.attention.append_keys(x, kv, layout)
        if observer is not None:
            observer(h, x, partial(self.fired_at, k, v, layout))
        if keep == "last":
            if before is not None:
                before = Verdict(last_real(before.fire, layout), last_real(before.score, layout))
            h, x = last_real(h, layout), last_real(x, layout)
            layout = layout.last()
            k, v = after.k, after.v

        def opened() -> Tensor:
            return self.update(h, self.attention.all_queries(x, k, v, layout))

        verdict = self.decide(
            gate, probe(h, x.detach(), layout, gate.needs, lambda: (h, opened()), before), layout
        )
        fire = verdict.fire if layout.valid is None else verdict.fire & layout.valid
        learns = verdict.weight is not None and torch.is_grad_enabled()
        if learns or dense_pays(fire, compute):
            out = choose(fire, opened(), h, verdict)
        else:
            out = self.fired_only(h, x, k, v, layout, fire)
        return out, {"kv": after}, replace(verdict, fire=fire, score=verdict.score.detach())

    def decide(self, gate: Gate, evidence: Evidence, layout: Layout) -> Verdict:
        """The gate's decision; a gate that updates its statistics in every training forward does so
        before it.
        """
        verdict = gate(evidence)
        if not (gate.updates_in_forward and self.training and torch.is_grad_enabled()):
            return verdict
        gate.observe(verdict.score if layout.valid is None else verdict.score[layout.valid])
        return gate(evidence)

    def scale(self) -> Tensor:
        """alpha [D], the scale of attention: sigmoid of its parameter, not below the floor."""
        return floored_sigmoid(self.alpha, self.alpha_floor)

    def update(self, h: Tensor, a: Tensor) -> Tensor:
        """The residual [..., D] of tokens that fired, from their attention output a."""
        h = h + self.scale().to(a.dtype) * a
        if self.mlp is None or self.mlp_norm is None:
            return h
        return h + self.mlp(self.mlp_norm(h))

    def fired_only(
        self, h: Tensor, x: Tensor, k: Tensor, v: Tensor, layout: Layout, fire: Tensor
    ) -> Tensor:
        """The residual after the block, with queries computed only where `fire` [B, T]."""
        rows, columns = fire.nonzero(as_tuple=True)
        # in training, weights without an effect get a gradient of 0
        if not len(rows) and not torch.is_grad_enabled():
            return h
        # one index is selected and added to far faster than two
        flat, tokens = rows * fire.shape[1] + columns, h.flatten(0, 1)
        a = self.attended(k, v, layout, x.flatten(0, 1).index_select(0, flat), (rows, columns))
        if self.mlp is None:  # added in place: the gradient through the residual stays as it is
            return tokens.index_add(0, flat, (self.scale().to(a.dtype) * a).to(h.dtype)).view_as(h)
        return tokens.index_copy(0, flat, self.update(tokens.index_select(0, flat), a)).view_as(h)

    def fired_at(
        self, k: Tensor, v: Tensor, layout: Layout, h: Tensor, x: Tensor, place: Place
    ) -> Tensor:
        """The residual [n, D] of some tokens after firing, from residual h and input x [n, D]."""
        return self.update(h, self.attended(k, v, layout, x, place))

    def attended(self, k: Tensor, v: Tensor, layout: Layout, x: Tensor, place: Place) -> Tensor:
        """The attention output [n, D] of some tokens, from their block inputs x [n, D]."""
        cos, sin = layout.rotary(self.attention.head_size, self.attention.theta)
        q = self.attention.ask(x, cos[place], sin[place])
        if layout.reset is None:
            a = attend.fired(q, k, v, place[0], layout.positions[place] + 1)
        else:
            a = attend.gathered(q, k, v, place[0], layout.mask[place])
        return self.attention.o_proj(a.flatten(1))

    def keys_program(self, p: Program, x: Vector) -> None:
        """The part for every token: its key and value."""
        self.attention.keys_program(p, x)

    def program(self, p: Program, h: Vector, x: Vector, out: Vector) -> None:
        """The part for tokens that fire: from residual h and input x to the residual after it."""
        p.add(h, self.attention.queries_program(p, x), self.scale().detach().float(), out)
        if self.mlp is not None and self.mlp_norm is not None:
            p.accumulate(out, p.swiglu(p.norm(out, self.mlp_norm), self.mlp))

    def cost(self, context: int, fire_rate: float) -> Cost:
        """One more token: keys and values always, the rest on a fraction `fire_rate` of tokens."""
        a = self.attention
        whole = a.cost(context)
        always = 2 * a.k_proj.weight.numel()
        fired = Cost(whole.flops - 2 * always, whole.weights - always, whole.state_read)
        if self.mlp is not None and self.mlp_norm is not None:
            fired = fired + self.mlp.cost() + Cost(weights=self.mlp_norm.weight.numel())
        small = self.alpha.numel() * (2 if self.norm else 1)
        rest = Cost(flops=2 * always, weights=always + small, state_held=whole.state_held)
        return fired * fire_rate + rest + self.gate.cost()


def floored_sigmoid(raw: Tensor, floor: float) -> Tensor:
    """sigmoid(raw), at least `floor`: raw is clamped, so below the floor it gets no gradient."""
    return (raw.clamp(min=math.log(floor / (1 - floor))) if floor else raw).sigmoid()


def gate_of(config: Config, index: int, first: Gate | None) -> Gate:
    """The gate of block `index`; first: that of block 0, None for itself."""
    if first is not None and config.blocks.decide == "once":
        return Follower(first)
    return find_gate(config.blocks.gate)(config.width, config.gate_options(), index)


def dense_pays(fire: Tensor, compute: str) -> bool:
    """Whether all queries are computed and those that did not fire are masked."""
    if compute not in COMPUTE:
        raise AmorError(f"compute: no {compute!r}; {nearest(compute, COMPUTE)}")
    if compute == "auto":
        # on a GPU, counting how many fired would synchronise a training step
        waits = torch.is_grad_enabled() and fire.device.type != "cpu"
        return waits or float(fire.float().mean()) > DENSE_ABOVE
    return compute == "full_with_mask"


def choose(fire: Tensor, opened: Tensor, h: Tensor, verdict: Verdict) -> Tensor:
    """The updated residual where the gate fires, the old one elsewhere; a gate with a gradient gets
    it everywhere.
    """
    out = torch.where(fire[..., None], opened, h)
    if verdict.weight is None:
        return out
    return out + (verdict.weight - verdict.weight.detach())[..., None].to(h.dtype) * (opened - h)
