"""Layers made ready for decode: every matrix packed for skinny products, what lies between them in C++.

Each takes x [R, D] of one new token a row and the layer's part of the state, which it updates in place.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from amor.decode import kernels
from amor.layout import Layout
from amor.mixers.attention import Attention
from amor.mixers.base import Mixer
from amor.mixers.fused import Fused
from amor.mixers.gated_deltanet import GatedDeltaNet
from amor.mixers.mamba2 import Mamba2
from amor.models.backbone import Layer
from amor.ops import attend
from amor.ops.product import Matrix, pack, product
from amor.parts import RMSNorm, SwiGLU, fan_heads, rotate
from amor.state import KV, Part

Mix = Callable[[Tensor, Part, Layout], tuple[Tensor, Part]]


def owned(t: Tensor) -> Tensor:
    """A tensor that can be written in place: float32, in one piece."""
    return t.float().contiguous()


class Norm:
    def __init__(self, norm: RMSNorm):
        self.weight, self.eps = norm.weight.detach().float().contiguous(), norm.eps

    def __call__(self, x: Tensor) -> Tensor:
        return kernels.norm(x, self.weight, self.eps)


class Side:
    """Several matrices with one input: their outputs side by side. No weight is copied in float32."""

    def __init__(self, kind: str, *layers: nn.Linear):
        weights = [layer.weight for layer in layers]
        self.matrices = [pack(w, kind) for w in weights]
        self.width = sum(m.outputs for m in self.matrices)

    def __call__(self, x: Tensor) -> Tensor:
        out = torch.empty(len(x), self.width)
        at = 0
        for m in self.matrices:
            product(x, m, out[:, at : at + m.outputs])
            at += m.outputs
        return out


class PackedMamba2:
    def __init__(self, mixer: Mamba2, kind: str):
        self.in_proj, self.out_proj = pack(mixer.in_proj.weight, kind), pack(mixer.out_proj.weight, kind)
        self.inner = mixer.inner
        taps = mixer.conv1d.weight.detach()[:, 0].float().T.contiguous()
        assert mixer.conv1d.bias is not None
        small = (mixer.conv1d.bias, mixer.dt_bias, -mixer.A_log.float().exp(), mixer.D, mixer.norm.weight)
        self.held = [taps, *(t.detach().float().contiguous() for t in small)]
        o = mixer.options
        sizes = 1, mixer.heads, o.head_size, o.groups, o.state_size, o.conv - 1
        self.shape = kernels.Mamba2Shape(*sizes, *(t.data_ptr() for t in self.held), mixer.norm.eps)

    def __call__(self, x: Tensor, part: Part, layout: Layout) -> tuple[Tensor, Part]:
        window, state = owned(part["conv"]), owned(part["scan"])  # type: ignore[arg-type]
        y = kernels.recur("mamba2", self.shape, product(x, self.in_proj), window, state, self.inner)
        return product(y, self.out_proj), {"conv": window, "scan": state}


class PackedDelta:
    def __init__(self, mixer: GatedDeltaNet, kind: str):
        m = mixer
        self.sides = Side(kind, m.q_proj, m.k_proj, m.v_proj, m.g_proj, m.a_proj, m.b_proj)
        self.o_proj, self.values = pack(m.o_proj.weight, kind), m.values
        taps = m.conv1d.weight.detach()[:, 0].float().T.contiguous()
        small = (m.dt_bias, -m.A_log.float().exp(), m.o_norm.weight)
        self.held = [taps, *(t.detach().float().contiguous() for t in small)]
        sizes = 1, m.heads, m.options.head_size, m.value_size, m.options.conv - 1
        self.shape = kernels.DeltaShape(*sizes, *(t.data_ptr() for t in self.held), m.o_norm.eps)

    def __call__(self, x: Tensor, part: Part, layout: Layout) -> tuple[Tensor, Part]:
        window, state = owned(part["conv"]), owned(part["delta"])  # type: ignore[arg-type]
        y = kernels.recur("delta", self.shape, self.sides(x), window, state, self.values)
        return product(y, self.o_proj), {"conv": window, "delta": state}


class PackedAttention:
    def __init__(self, mixer: Attention, kind: str):
        self.q_proj, self.o_proj = pack(mixer.q_proj.weight, kind), pack(mixer.o_proj.weight, kind)
        self.kv = Side(kind, mixer.k_proj, mixer.v_proj)
        self.size, self.theta = mixer.head_size, mixer.theta

    def turned(self, x: Tensor, layout: Layout, rows: Tensor | slice) -> Tensor:
        cos, sin = layout.rotary(self.size, self.theta)
        return rotate(fan_heads(x, self.size), cos[rows, 0], sin[rows, 0])  # [R, H, d]

    def remember(self, x: Tensor, part: Part, layout: Layout) -> KV:
        """Keys and values of the new tokens, added to those held."""
        k, v = self.kv(x).chunk(2, dim=1)
        held = part["kv"]
        assert isinstance(held, KV)
        return held.append(self.turned(k, layout, slice(None))[:, :, None], fan_heads(v, self.size)[:, :, None], layout)

    def ask(self, x: Tensor, kv: KV, layout: Layout, rows: Tensor) -> Tensor:
        """The attention output of x [n, D], the tokens of some rows."""
        q = self.turned(product(x, self.q_proj), layout, rows)
        return product(attend.single(q, kv.k, kv.v, rows, layout.start[rows] + 1).flatten(1), self.o_proj)

    def __call__(self, x: Tensor, part: Part, layout: Layout) -> tuple[Tensor, Part]:
        kv = self.remember(x, part, layout)
        return self.ask(x, kv, layout, torch.arange(len(x))), {"kv": kv}


class PackedFused:
    def __init__(self, mixer: Fused, kind: str):
        self.mamba2, self.attention = PackedMamba2(mixer.mamba2, kind), PackedAttention(mixer.attention, kind)
        self.norms = Norm(mixer.mamba2_norm), Norm(mixer.attention_norm)
        self.scales = mixer.mamba2_scale.detach().float(), mixer.attention_scale.detach().float()

    def __call__(self, x: Tensor, part: Part, layout: Layout) -> tuple[Tensor, Part]:
        m, after_m = self.mamba2(x, part, layout)
        a, after_a = self.attention(x, part, layout)
        return (self.norms[0](m) * self.scales[0] + self.norms[1](a) * self.scales[1]) / 2, after_m | after_a


class PackedMLP:
    def __init__(self, mlp: SwiGLU, kind: str):
        self.both, self.down = Side(kind, mlp.gate_proj, mlp.up_proj), pack(mlp.down_proj.weight, kind)

    def add(self, x: Tensor, h: Tensor) -> Tensor:
        """h += mlp(x)."""
        return product(kernels.swiglu(self.both(x)), self.down, h, add=True)


def whole(mixer: Mixer, kind: str) -> Mix:
    """A mixer that has no packed form: its own forward, on one token."""

    def mix(x: Tensor, part: Part, layout: Layout) -> tuple[Tensor, Part]:
        y, after = mixer(x[:, None], part, layout)
        return y[:, 0], after

    return mix


PACKED: dict[type, Callable[..., Mix]] = {
    Mamba2: PackedMamba2,
    GatedDeltaNet: PackedDelta,
    Attention: PackedAttention,
    Fused: PackedFused,
}


class PackedLayer:
    def __init__(self, layer: Layer, kind: str):
        self.mixer_norm = Norm(layer.mixer_norm)
        self.mixer = PACKED.get(type(layer.mixer), whole)(layer.mixer, kind)
        self.mlp = None
        if layer.mlp is not None and layer.mlp_norm is not None:
            self.mlp = Norm(layer.mlp_norm), PackedMLP(layer.mlp, kind)

    def __call__(self, h: Tensor, part: Part, layout: Layout) -> tuple[Tensor, Part]:
        """h [R, D] is updated in place."""
        mixed, after = self.mixer(self.mixer_norm(h), part, layout)
        h += mixed
        if self.mlp is not None:
            norm, mlp = self.mlp
            mlp.add(norm(h), h)
        return h, after


def matrices(layer: object) -> list[Matrix]:
    """Every matrix a packed thing holds: what one step reads."""
    found: list[Matrix] = []
    for held in vars(layer).values() if hasattr(layer, "__dict__") else []:
        for item in held if isinstance(held, list | tuple) else [held]:
            found += [item] if isinstance(item, Matrix) else matrices(item) if type(item).__module__ == __name__ else []
    return found
