"""What one token needs, said by the layers themselves: a program of a few instructions, which decode compiles.

A mixer states its program beside its forward, in the same order and with the same names:

    def program(self, p, x):                                      # x: a vector a row
        z, xBC, dt = p.linear(x, self.in_proj).split(...)         # matrices
        u, B, C = p.conv(xBC, self.conv1d, "conv").split(...)     # a window of the state
        y = p.scan(u, dt, B, C, ...)                              # a recurrence
        return p.linear(p.gated_norm(y, z, self.norm, gate_first=True), self.out_proj)

Nothing is computed while a program is recorded: a Vector is a place where the numbers of one token will stand. An instruction
is a frozen record of vectors, tensors, modules, numbers and names of state tensors; amor/decode/walk.cpp has a struct of the
same name and order for each, and calls the operator's one-token kernel (ops/<op>/step.h). What cannot be said here (a wrapped
or watched layer, a mixer without a program) is refused with `UnsaidError`, and runs by its own forward.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from amor.parts import Linear, RMSNorm, ShortConv, SwiGLU, touched


class UnsaidError(Exception):
    """A layer that has no program, and why."""


@dataclass(frozen=True)
class Vector:
    """Numbers [rows, width] inside a register [rows, of]: a place in the room of a program, or memory handed in."""

    where: int  # -1: in the room, `offset` numbers a row from its beginning; else which of the memories handed in
    offset: int
    of: int  # width of the register
    start: int
    width: int

    def split(self, *widths: int) -> tuple[Vector, ...]:
        assert sum(widths) == self.width, f"{widths} of {self.width}"
        starts = [sum(widths[:i]) for i in range(len(widths))]
        return tuple(replace(self, start=self.start + a, width=w) for a, w in zip(starts, widths))


@dataclass(frozen=True)
class Held:
    """A tensor of the layer's part of the state, updated in place: its name, and its shape a row. Keys and values: theta > 0."""

    part: int
    name: str
    shape: tuple[int, ...]
    theta: float = 0.0  # of the rotary positions of keys [heads, size]


# Instructions. Fields are those of a C++ struct, in the same order: Vector, Tensor (None: null), Held, int, float, Linears.


@dataclass(frozen=True)
class Product:
    kind: ClassVar[int] = 0
    x: Vector
    out: Vector
    add: int  # out += instead of out =
    layers: tuple[nn.Linear, ...]  # their outputs side by side


@dataclass(frozen=True)
class Norm:
    kind: ClassVar[int] = 1
    x: Vector
    out: Vector
    weight: Tensor  # [size]
    size: int  # of one normed vector: a head's, or the whole width
    eps: float


@dataclass(frozen=True)
class GatedNorm:
    kind: ClassVar[int] = 2
    x: Vector
    z: Vector
    out: Vector
    weight: Tensor
    size: int
    gate_first: int
    eps: float


@dataclass(frozen=True)
class Gate:
    """out = x act(z), act SiLU (0) or the sigmoid (1)."""

    kind: ClassVar[int] = 3
    x: Vector
    z: Vector
    out: Vector
    act: int


@dataclass(frozen=True)
class Add:
    """out = x + scale y; scale a channel, or 1."""

    kind: ClassVar[int] = 4
    x: Vector
    y: Vector
    out: Vector
    scale: Tensor | None


@dataclass(frozen=True)
class Conv:
    kind: ClassVar[int] = 5
    x: Vector
    out: Vector
    taps: Tensor  # [taps, channels]
    bias: Tensor | None
    window: Held
    reach: int  # taps - 1


@dataclass(frozen=True)
class Scan:
    kind: ClassVar[int] = 6
    u: Vector
    dt: Vector
    B: Vector
    C: Vector
    out: Vector
    A: Tensor  # [heads] < 0
    D: Tensor
    dt_bias: Tensor
    state: Held
    heads: int
    size: int
    groups: int
    states: int  # numbers of a state


@dataclass(frozen=True)
class Delta:
    kind: ClassVar[int] = 7
    q: Vector
    k: Vector
    v: Vector
    a: Vector  # [heads] or [heads * size]: a decay a head, or a channel
    b: Vector
    out: Vector
    A: Tensor  # [heads] < 0
    dt_bias: Tensor  # as a
    state: Held
    heads: int
    size: int  # of a key
    value: int
    rates: int  # decays a head: 1 or size


@dataclass(frozen=True)
class Keys:
    """Keys, turned by their position, and values of the new token into their slots."""

    kind: ClassVar[int] = 8
    k: Vector
    v: Vector
    kv: Held
    heads: int
    size: int


@dataclass(frozen=True)
class Attend:
    """Queries, turned, against all keys of their row up to their own."""

    kind: ClassVar[int] = 9
    q: Vector
    out: Vector
    kv: Held
    heads: int
    size: int


@dataclass(frozen=True)
class Dot:
    """One number: x times a weight, and a bias."""

    kind: ClassVar[int] = 10
    x: Vector
    out: Vector
    weight: Tensor  # [width]
    bias: Tensor | None  # one number


@dataclass(frozen=True)
class SiluDot:
    """out += weight . silu(x + bias): the output of a hidden layer."""

    kind: ClassVar[int] = 11
    x: Vector
    out: Vector
    bias: Tensor  # [width]
    weight: Tensor  # [width]


Instruction = Product | Norm | GatedNorm | Gate | Add | Conv | Scan | Delta | Keys | Attend | Dot | SiluDot
INSTRUCTIONS: tuple[type[Instruction], ...] = (
    *(Product, Norm, GatedNorm, Gate, Add, Conv, Scan, Delta, Keys, Attend, Dot, SiluDot),
)
ROOM = -1


class Program:
    """Records instructions. Memory handed in comes first: `given` says how wide each is."""

    def __init__(self, *given: int):
        self.given = [Vector(i, 0, width, 0, width) for i, width in enumerate(given)]
        self.steps: list[Instruction] = []
        self.room = 0  # numbers a row
        self.part = 0  # of the state: which layer is being said
        self._used = 0

    def layer(self, part: int) -> None:
        """What follows is another layer's: nothing of the last one is read again but memory handed in."""
        self.part, self._used = part, 0

    def vector(self, width: int) -> Vector:
        """Room for numbers, beginning at a whole cache line."""
        place = Vector(ROOM, self._used, width, 0, width)
        self._used += -(-width // 16) * 16
        self.room = max(self.room, self._used)
        return place

    def linear(self, x: Vector, *layers: nn.Linear) -> Vector:
        """Matrices with one input: their outputs side by side."""
        for layer in layers:
            plainly(layer)
        out = self.vector(sum(layer.weight.shape[0] for layer in layers))
        self.steps.append(Product(x, out, 0, layers))
        return out

    def norm(self, x: Vector, norm: RMSNorm, scale: Tensor | None = None, out: Vector | None = None) -> Vector:
        """RMS norm of the whole vector, or of heads as wide as the norm; `scale` is multiplied into its weights."""
        plainly(norm)
        weight = norm.weight if scale is None else norm.weight.detach().float() * scale
        out = out or self.vector(x.width)
        self.steps.append(Norm(x, out, weight, weight.numel(), norm.eps))
        return out

    def unit_norm(self, x: Vector, size: int, length: float, eps: float) -> Vector:
        """Heads of `size` scaled to a length: eps is added to the mean of squares."""
        out = self.vector(x.width)
        self.steps.append(Norm(x, out, torch.full((size,), length * size**-0.5), size, eps))
        return out

    def gated_norm(self, x: Vector, z: Vector, norm: RMSNorm, gate_first: bool) -> Vector:
        plainly(norm)
        out = self.vector(x.width)
        self.steps.append(GatedNorm(x, z, out, norm.weight, norm.weight.numel(), int(gate_first), norm.eps))
        return out

    def gate(self, x: Vector, z: Vector, act: Literal["silu", "sigmoid"]) -> Vector:
        out = self.vector(x.width)
        self.steps.append(Gate(x, z, out, ("silu", "sigmoid").index(act)))
        return out

    def swiglu(self, x: Vector, mlp: SwiGLU) -> Vector:
        plainly(mlp)
        gate, up = self.linear(x, mlp.gate_proj, mlp.up_proj).split(*(2 * [mlp.gate_proj.weight.shape[0]]))
        return self.linear(self.gate(up, gate, "silu"), mlp.down_proj)

    def add(self, x: Vector, y: Vector, scale: Tensor | None = None, out: Vector | None = None) -> Vector:
        out = out or self.vector(x.width)
        self.steps.append(Add(x, y, out, scale))
        return out

    def accumulate(self, h: Vector, y: Vector) -> None:
        """h += y; where y is what a product has just given, the product adds by itself."""
        last = self.steps[-1]
        if isinstance(last, Product) and last.out == y:
            self.steps[-1] = replace(last, out=h, add=1)
        else:
            self.add(h, y, out=h)

    def conv(self, x: Vector, conv: ShortConv, name: str) -> Vector:
        plainly(conv)
        out, taps = self.vector(x.width), conv.weight.detach()[:, 0].T.contiguous()
        reach = len(taps) - 1
        self.steps.append(Conv(x, out, taps, conv.bias, self.held(name, reach, x.width), reach))
        return out

    def scan(
        self, u: Vector, dt: Vector, B: Vector, C: Vector, A: Tensor, D: Tensor, dt_bias: Tensor, groups: int, name: str
    ) -> Vector:
        """The Mamba2 recurrence; dt as projected, A < 0 a head."""
        out, heads = self.vector(u.width), A.numel()
        size, states = u.width // heads, B.width // groups
        held = self.held(name, heads, size, states)
        self.steps.append(Scan(u, dt, B, C, out, A, D, dt_bias, held, heads, size, groups, states))
        return out

    def delta(self, q: Vector, k: Vector, v: Vector, a: Vector, b: Vector, A: Tensor, dt_bias: Tensor, name: str) -> Vector:
        """The gated delta rule; a and b as projected, A < 0 a head. a and dt_bias a head, or a channel of its keys."""
        out, heads = self.vector(v.width), A.numel()
        size, value = k.width // heads, v.width // heads
        held = self.held(name, heads, size, value)
        self.steps.append(Delta(q, k, v, a, b, out, A, dt_bias, held, heads, size, value, a.width // heads))
        return out

    def keys(self, k: Vector, v: Vector, size: int, theta: float, name: str) -> None:
        """Keys, turned by their position, and values into the state."""
        heads = k.width // size
        self.steps.append(Keys(k, v, self.held(name, heads, size, theta=theta), heads, size))

    def attend(self, q: Vector, size: int, theta: float, name: str) -> Vector:
        out, heads = self.vector(q.width), q.width // size
        self.steps.append(Attend(q, out, self.held(name, heads, size, theta=theta), heads, size))
        return out

    def dot(self, x: Vector, weight: Tensor, bias: Tensor | None = None, out: Vector | None = None) -> Vector:
        out = out or self.vector(1)
        self.steps.append(Dot(x, out, weight, bias))
        return out

    def silu_dot(self, x: Vector, bias: Tensor, weight: Tensor, out: Vector) -> None:
        """out += weight . silu(x + bias), one number per row."""
        self.steps.append(SiluDot(x, out, bias, weight))

    def held(self, name: str, *shape: int, theta: float = 0.0) -> Held:
        return Held(self.part, name, shape, theta)


PLAIN = (Linear, RMSNorm, ShortConv, SwiGLU)


def plainly(module: nn.Module) -> None:
    """Refuse a module that is more than its weights: replaced or wrapped (as adapters do), or watched."""
    if type(module) not in PLAIN:
        raise UnsaidError(f"{type(module).__name__} stands where {' or '.join(cls.__name__ for cls in PLAIN)} is expected")
    if touched(module):
        raise UnsaidError(touched(module))


def says_itself(module: nn.Module) -> None:
    """Refuse a module without a program, one whose class changed the forward its program speaks of, and one that is watched."""
    cls = type(module)
    if not hasattr(cls, "program"):
        raise UnsaidError(f"{cls.__name__} states no program")
    forward, program = (next(base for base in cls.__mro__ if name in vars(base)) for name in ("forward", "program"))
    if not issubclass(program, forward):
        raise UnsaidError(f"{cls.__name__} has a forward of its own, and only {program.__name__}'s program")
    for part in module.modules():
        if touched(part):
            raise UnsaidError(touched(part))
