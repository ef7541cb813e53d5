"""Layers made ready for decode: every matrix packed for skinny products, recurrent layers in C++ from end to end.

Each takes x [R, D] of one new token a row and the layer's part of the state, which it updates in place. Layers that can be
described to C++ and follow each other are one call there (Stretch): no thread waits for Python between two of them.
"""

import ctypes
import math
from collections.abc import Callable, Sequence
from itertools import groupby

import torch
from torch import Tensor, nn

from amor.decode import kernels
from amor.errors import AmorError
from amor.layout import Layout
from amor.mixers.attention import Attention
from amor.mixers.base import Mixer
from amor.mixers.fused import Fused
from amor.mixers.gated_deltanet import GatedDeltaNet
from amor.mixers.mamba2 import Mamba2
from amor.models.backbone import Layer
from amor.ops import attend
from amor.ops.product import Matrix, pack, product, spend_product
from amor.ops.rowwise import rotate
from amor.ops.spent import someone_counts, spend
from amor.parts import RMSNorm, ShortConv, SwiGLU, fan_heads
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


class Recurrent:
    """A mixer whose whole step is in C++: a description of it, and what its part of the state is called and measures."""

    shape: kernels.Mamba2Shape | kernels.DeltaShape
    state: str
    flops: int  # a number of the recurrent state and token
    sizes: dict[str, tuple[int, ...]]  # of a row's part

    def __init__(self, kind: str, into: Sequence[nn.Linear], out: nn.Linear):
        self.into, self.out = [pack(layer.weight, kind) for layer in into], pack(out.weight, kind)

    def describe(self, layer: kernels.Layer) -> None:
        layer.count = len(self.into)
        for index, matrix in enumerate(self.into):
            layer.into[index] = kernels.Weights.of(matrix)
        layer.out = kernels.Weights.of(self.out)
        setattr(layer, "mamba2" if isinstance(self.shape, kernels.Mamba2Shape) else "delta", ctypes.pointer(self.shape))

    def enter(self, layer: kernels.Layer, part: Part, rows: int) -> Part:
        """Hand a part of the state to C++, which writes to it; the part as it will be."""
        held = {name: owned(part[name]) for name in ("conv", self.state)}  # type: ignore[arg-type]
        for name, t in held.items():
            if t.shape != (rows, *self.sizes[name]):
                want = [rows, *self.sizes[name]]
                raise AmorError(f"state {name!r} has shape {list(t.shape)}, this step needs {want}; is it of another model?")
        layer.window, layer.state = held["conv"].data_ptr(), held[self.state].data_ptr()
        return {**part, **held}

    def spend(self, rows: int) -> None:
        numbers = rows * math.prod(self.sizes[self.state])
        spend("recurrence", self.flops * numbers, 4 * (numbers + rows * math.prod(self.sizes["conv"])))
        for matrix in (*self.into, self.out):
            spend_product("products", rows, matrix)

    def __call__(self, x: Tensor, part: Part, layout: Layout) -> tuple[Tensor, Part]:
        layer = kernels.Layer()
        self.describe(layer)
        after = self.enter(layer, part, len(x))
        self.spend(len(x))
        return kernels.mixed(layer, x), after


class PackedMamba2(Recurrent):
    state, flops = "scan", 4  # decay and feed, and read out

    def __init__(self, mixer: Mamba2, kind: str):
        super().__init__(kind, [mixer.in_proj], mixer.out_proj)
        assert mixer.conv1d.bias is not None
        small = (mixer.conv1d.bias, mixer.dt_bias, -mixer.A_log.float().exp(), mixer.D, mixer.norm.weight)
        self.held = [taps(mixer.conv1d), *(owned(t.detach()) for t in small)]
        o = mixer.options
        self.sizes = {"conv": (o.conv - 1, mixer.mixed), "scan": (mixer.heads, o.head_size, o.state_size)}
        sizes = mixer.heads, o.head_size, o.groups, o.state_size, o.conv - 1
        self.shape = kernels.Mamba2Shape(*sizes, *(t.data_ptr() for t in self.held), mixer.norm.eps)


class PackedDelta(Recurrent):
    state, flops = "delta", 6  # as Mamba2, and what the state holds of a key

    def __init__(self, mixer: GatedDeltaNet, kind: str):
        m = mixer
        super().__init__(kind, [m.q_proj, m.k_proj, m.v_proj, m.g_proj, m.a_proj, m.b_proj], m.o_proj)
        small = (m.dt_bias, -m.A_log.float().exp(), m.o_norm.weight)
        self.held = [taps(m.conv1d), *(owned(t.detach()) for t in small)]
        self.sizes = {
            "conv": (m.options.conv - 1, 2 * m.keys + m.values),
            "delta": (m.heads, m.options.head_size, m.value_size),
        }
        sizes = m.heads, m.options.head_size, m.value_size, m.options.conv - 1
        self.shape = kernels.DeltaShape(*sizes, *(t.data_ptr() for t in self.held), m.o_norm.eps)


def taps(conv: ShortConv) -> Tensor:
    """[taps, channels]"""
    return conv.weight.detach()[:, 0].float().T.contiguous()


class PackedAttention:
    def __init__(self, mixer: Attention, kind: str):
        self.q_proj, self.o_proj = pack(mixer.q_proj.weight, kind), pack(mixer.o_proj.weight, kind)
        self.kv = [pack(layer.weight, kind) for layer in (mixer.k_proj, mixer.v_proj)]
        self.described = [kernels.Weights.of(matrix) for matrix in self.kv]
        self.size, self.theta = mixer.head_size, mixer.theta

    def turn(self, layout: Layout) -> tuple[Tensor, Tensor]:
        """Cosine and sine of each row's position, [R, d / 2]."""
        cos, sin = layout.rotary(self.size, self.theta)
        return cos[:, 0], sin[:, 0]

    def opened(self, part: Part, layout: Layout) -> KV:
        """The keys and values held, with room for those of new tokens."""
        held = part["kv"]
        assert isinstance(held, KV)
        after = held.opened(layout)
        k, v = after.buffer.k, after.buffer.v
        if k.stride() != v.stride() or k.stride()[2:] != (self.size, 1) or k.dtype != torch.float32:
            raise AmorError("a packed step needs keys and values in float32, a head's in one piece; State.reserve makes them so")
        return after

    def slots(self, x: Tensor, kv: KV, layout: Layout) -> kernels.Slots:
        """Where keys and values of x [R, D] go: row r's to the slot of its position."""
        k, v = kv.buffer.k, kv.buffer.v
        _, heads, capacity, size = k.shape
        assert x.is_contiguous() and layout.start.is_contiguous()
        memory = (t.data_ptr() for t in (x, *self.turn(layout), layout.start, k, v))
        return kernels.Slots(*self.described, x.shape[0], heads, size, *k.stride()[:2], capacity, *memory)

    def spend(self, rows: int) -> None:
        for matrix in self.kv:
            spend_product("products", rows, matrix)

    def remember(self, x: Tensor, part: Part, layout: Layout) -> KV:
        """Keys and values of the new tokens, added to those held."""
        after = self.opened(part, layout)
        self.spend(x.shape[0])
        kernels.remember([self.slots(x, after, layout)])
        return after

    def ask(self, x: Tensor, kv: KV, layout: Layout, rows: Tensor | None = None) -> Tensor:
        """The attention output of x [n, D], the tokens of some rows or of all."""
        (cos, sin), start = self.turn(layout), layout.start
        if rows is None:
            rows = torch.arange(len(x))
        else:
            cos, sin, start = cos[rows], sin[rows], start[rows]
        q = rotate(fan_heads(product(x, self.q_proj), self.size), cos, sin)  # [n, H, d]
        return product(attend.single(q, kv.k, kv.v, rows, start + 1).flatten(1), self.o_proj)

    def __call__(self, x: Tensor, part: Part, layout: Layout) -> tuple[Tensor, Part]:
        kv = self.remember(x, part, layout)
        return self.ask(x, kv, layout), {"kv": kv}


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

    def describe(self) -> kernels.Layer:
        """The layer for C++, where its mixer can be described."""
        assert isinstance(self.mixer, Recurrent)
        layer = kernels.Layer(norm=self.mixer_norm.weight.data_ptr(), eps=self.mixer_norm.eps)
        self.mixer.describe(layer)
        if self.mlp is not None:
            norm, mlp = self.mlp
            layer.mlp_norm, layer.mlp_eps = norm.weight.data_ptr(), norm.eps
            layer.gate, layer.up = (kernels.Weights.of(m) for m in mlp.both.matrices)
            layer.down = kernels.Weights.of(mlp.down)
        return layer


class Stretch:
    """Layers that follow each other and run as one call: recurrent ones all in C++, any other by itself."""

    def __init__(self, layers: list[PackedLayer]):
        self.layers = layers
        native = all(isinstance(layer.mixer, Recurrent) for layer in layers)
        self.described = (kernels.Layer * len(layers))(*(layer.describe() for layer in layers)) if native else None

    def __call__(self, h: Tensor, parts: Sequence[Part], layout: Layout) -> tuple[Tensor, list[Part]]:
        """h [R, D] is updated in place."""
        after = []
        if self.described is None:
            for layer, part in zip(self.layers, parts, strict=True):
                h, part = layer(h, part, layout)
                after.append(part)
            return h, after
        for layer, described, part in zip(self.layers, self.described, parts, strict=True):
            after.append(layer.mixer.enter(described, part, len(h)))  # type: ignore[attr-defined]
        if someone_counts():
            self.spend(len(h))
        kernels.walk(self.described, h)
        return h, after

    def spend(self, rows: int) -> None:
        for layer in self.layers:
            layer.mixer.spend(rows)  # type: ignore[attr-defined]
            for matrix in [] if layer.mlp is None else matrices(layer.mlp[1]):
                spend_product("products", rows, matrix)


def stretches(layers: list[PackedLayer]) -> list[Stretch]:
    groups = groupby(layers, lambda layer: isinstance(layer.mixer, Recurrent))
    return [Stretch(list(group)) for _, group in groups]


def matrices(layer: object) -> list[Matrix]:
    """Every matrix a packed thing holds: what one step reads."""
    found: list[Matrix] = []
    for held in vars(layer).values() if hasattr(layer, "__dict__") else []:
        for item in held if isinstance(held, list | tuple) else [held]:
            found += [item] if isinstance(item, Matrix) else matrices(item) if type(item).__module__ == __name__ else []
    return found
