"""The AMOR block: attention on the residual stream, run only where the gate fires.

    h <- h + fire * sigmoid(alpha) * W_O SDPA(RoPE(W_Q x), RoPE(W_K x), W_V x)

Keys and values are computed and kept for every token. Queries are computed for all and masked
(`full_with_mask`), or only where the gate fires (`true_sparse`); both give the same numbers, and
`auto` takes the faster, in training too. What happens around a block is amor/models/gated.py.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from amor.config import Config
from amor.errors import AmorError, nearest
from amor.form import Part
from amor.gates.base import Gate, Verdict
from amor.kv import KV
from amor.layout import Layout, last_real
from amor.mixers.attention import Attention, AttentionOptions
from amor.models.gated import Norms, gate_of
from amor.ops import attend
from amor.parts import Cost, RMSNorm, SwiGLU
from amor.program import Program, Vector

# firing rate above which computing all queries is faster: docs/log.md has the measurement
DENSE_ABOVE = 0.8
COMPUTE = ("auto", "full_with_mask", "true_sparse")


@dataclass(frozen=True)
class GateTrace:
    """The decisions of one block's gate, [B, T] each; pads never fire and score 0."""

    score: Tensor
    fire: Tensor
    threshold: Tensor


Place = tuple[Tensor, Tensor]  # row and column of each of some tokens


class Block(nn.Module):
    """Attention behind a gate."""

    def __init__(self, config: Config, index: int, first: Gate | None = None):
        """first: the gate of block 0; None for that block itself."""
        super().__init__()
        blocks, eps = config.blocks, config.eps("block")
        # block 0 has no norm of its own: amor/models/gated.py puts norm_f before it
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
        k: Tensor,
        v: Tensor,
        layout: Layout,
        verdict: Verdict,
        compute: str = "auto",
    ) -> Tensor:
        """The residual after the block: attention where its gate fires, elsewhere unchanged.

        h, x: [B, T, D] the residual and the block's input; k, v: [B, H, L, d] keys and values.
        compute: which queries are computed, one of COMPUTE.
        """
        learns = verdict.weight is not None and torch.is_grad_enabled()
        if learns or dense_pays(verdict.fire, compute):
            return choose(verdict.fire, self.opened(h, x, k, v, layout), h, verdict)
        return self.fired_only(h, x, k, v, layout, verdict.fire)

    def opened(self, h: Tensor, x: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Tensor:
        """The residual after the block where every token fires."""
        return self.update(h, self.attention.all_queries(x, k, v, layout))

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


class TorchBlocks:
    """The blocks of one forward by torch: all queries computed and masked, or only those that fire.

    In training, prefill and evaluation; in decode, where a step cannot be compiled.
    """

    def __init__(
        self,
        norms: Norms[RMSNorm],
        blocks: Sequence[Block],
        parts: Sequence[Part],
        layout: Layout,
        compute: str = "auto",
        keep: str = "all",
    ):
        """parts: of the State, one per block; keep: "last" queries each row's last token only."""
        self.norms, self.blocks, self.parts, self.layout = norms, blocks, list(parts), layout
        self.compute, self.last = compute, len(blocks) - 1 if keep == "last" else None
        self.keys: list[tuple[Tensor, Tensor]] = []  # per block: k and v that queries attend to
        self.enter, self.output = norms.enter, norms.output

    @property
    def training(self) -> bool:
        """Whether the blocks are in training mode."""
        return self.blocks[0].training

    def input(self, index: int, h: Tensor) -> Tensor:
        return self.norms.column(index, h)

    def write(self, index: int, h: Tensor, x: Tensor) -> None:
        kv = self.parts[index]["kv"]
        assert isinstance(kv, KV)
        k, v, after = self.blocks[index].attention.append_keys(x, kv, self.layout)
        self.keys.append((k, v))
        self.parts[index] = {"kv": after}

    def queries(
        self, index: int, h: Tensor, x: Tensor, before: Verdict | None
    ) -> tuple[Tensor, Tensor, Verdict | None]:
        if index != self.last:
            return h, x, before
        layout, after = self.layout, self.parts[index]["kv"]
        assert isinstance(after, KV)
        if before is not None:
            before = Verdict(last_real(before.fire, layout), last_real(before.score, layout))
        self.layout, self.keys[index] = layout.last(), (after.k, after.v)
        return last_real(h, layout), last_real(x, layout), before

    def opened(self, index: int, h: Tensor, x: Tensor) -> Tensor:
        """The residual after block `index` where every token fires."""
        return self.blocks[index].opened(h, x, *self.keys[index], self.layout)

    def apply(self, index: int, h: Tensor, x: Tensor, verdict: Verdict) -> Tensor:
        return self.blocks[index](h, x, *self.keys[index], self.layout, verdict, self.compute)

    def columns(self, h: Tensor, which: Sequence[int], rows: list[int] | None) -> Tensor:
        """[columns, n, D] of the residual of some rows, in a call of one token per row."""
        some = h[:, 0] if rows is None else h[rows, 0]
        return torch.stack([self.norms.column(index, some) for index in which])
