"""Causal multi-head attention with rotary positions."""

from dataclasses import dataclass

import torch
from torch import Tensor

from amor.checks import HeadSize, InnerWidth, Theta, divides, even_heads
from amor.form import Part
from amor.kv import KV
from amor.layout import Layout, last_real
from amor.mixers.base import Mixer
from amor.ops import attend
from amor.ops.rowwise import rotate
from amor.parts import Cost, Linear, fan_heads, linear_cost, linears_sharing_input, touched
from amor.program import Program, Vector


@dataclass(frozen=True)
class AttentionOptions:
    """Shape of multi-head attention; every head has its own keys and values."""

    # channels per head, the paper's; even, since rotary embedding turns pairs
    head_size: HeadSize = 64
    rope_theta: Theta = 10_000.0  # base of the rotary frequencies, RoFormer's
    width: InnerWidth = 0  # channels of all heads together; 0: as wide as the model

    def check(self, width: int) -> None:
        """Refuse heads that do not divide the width, or of an odd size."""
        divides("attention.head_size", self.width or width, self.head_size, "head size")
        even_heads("attention.head_size", self.head_size)

    def parameters(self, width: int) -> int:
        """Exactly those of the mixer at a model width."""
        return 4 * width * (self.width or width)  # q, k, v and output projection


class Attention(Mixer):
    """softmax(q k^T / sqrt(d)) v with rotary q and k; the State holds keys and values."""

    kind = "attention"
    Options = AttentionOptions

    def __init__(self, width: int, options: AttentionOptions, eps: float):
        super().__init__()
        inner = options.width or width
        self.head_size, self.theta = options.head_size, options.rope_theta
        self.heads = inner // options.head_size
        self.q_proj = Linear(width, inner)
        self.k_proj = Linear(width, inner)
        self.v_proj = Linear(width, inner)
        self.o_proj = Linear(inner, width)

    def start(self, batch: int, device: torch.device, dtype: torch.dtype) -> Part:
        return {"kv": KV.empty(batch, self.heads, self.head_size, device, dtype)}

    def append_keys(self, x: Tensor, kv: KV, layout: Layout) -> tuple[Tensor, Tensor, KV]:
        """Append the keys and values of tokens x [B, T, D].

        Returns those that queries of this call may look at, [B, H, L, d] each, and the state after.
        """
        k, v = (
            fan_heads(t, self.head_size)
            for t in linears_sharing_input(x, [self.k_proj], [self.v_proj])
        )
        k, v = (
            rotate(k, *layout.rotary(self.head_size, self.theta)).transpose(1, 2),
            v.transpose(1, 2),
        )
        after = kv.append(k, v, layout)
        if layout.reset is None:
            return after.k, after.v, after
        return (
            torch.cat([kv.k[:, :, : layout.max_position], k], 2),
            torch.cat([kv.v[:, :, : layout.max_position], v], 2),
            after,
        )

    def ask(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Queries [..., H, d] of tokens x [..., D] at the positions of cos and sin."""
        return rotate(fan_heads(self.q_proj(x), self.head_size), cos, sin)

    def forward(self, x: Tensor, state: Part, layout: Layout) -> tuple[Tensor, Part]:
        kv = state["kv"]
        assert isinstance(kv, KV)
        k, v, after = self.append_keys(x, kv, layout)
        return self.all_queries(x, k, v, layout), {"kv": after}

    def last(self, x: Tensor, state: Part, layout: Layout) -> tuple[Tensor, Part]:
        if touched(self):  # a hook on the forward must see it run
            return super().last(x, state, layout)
        kv = state["kv"]
        assert isinstance(kv, KV)
        _, _, after = self.append_keys(x, kv, layout)
        out = self.all_queries(last_real(x, layout), after.k, after.v, layout.last())
        return out, {"kv": after}

    def all_queries(self, x: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Tensor:
        """x [B, T, D] against k, v [B, H, L, d] -> [B, T, D]."""
        q = self.ask(x, *layout.rotary(self.head_size, self.theta)).transpose(1, 2)
        if layout.causal:
            a = attend.dense(q, k, v, causal=True)
        elif layout.reset is None:
            a = attend.upto(q, k, v, layout.positions + 1)
        else:
            a = attend.dense(q, k, v, mask=layout.mask)
        return self.o_proj(a.transpose(1, 2).flatten(2))

    def program(self, p: Program, x: Vector) -> Vector:
        inner = self.heads * self.head_size
        q, k, v = p.linear(x, self.q_proj, self.k_proj, self.v_proj).split(inner, inner, inner)
        p.keys(k, v, self.head_size, self.theta, "kv")
        return p.linear(p.attend(q, self.head_size, self.theta, "kv"), self.o_proj)

    def keys_program(self, p: Program, x: Vector) -> None:
        """The part of the program that every token needs, whether its queries run or not."""
        inner = self.heads * self.head_size
        k, v = p.linear(x, self.k_proj, self.v_proj).split(inner, inner)
        p.keys(k, v, self.head_size, self.theta, "kv")

    def queries_program(self, p: Program, x: Vector) -> Vector:
        """The part that only a token which attends needs, after `keys_program`."""
        return p.linear(
            p.attend(p.linear(x, self.q_proj), self.head_size, self.theta, "kv"), self.o_proj
        )

    def cost(self, context: int) -> Cost:
        inner, seen = self.heads * self.head_size, context + 1
        token = 2 * 4 * inner  # bytes of one key and value
        products = linear_cost(self.q_proj, self.k_proj, self.v_proj, self.o_proj)
        return products + Cost(
            flops=4 * inner * seen, state_read=token * seen, state_held=token * context
        )
