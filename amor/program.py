"""What one token needs, as a program of a few instructions that decode compiles.

A mixer states its program next to its forward, in the same order and with the same names:

    def program(self, p, x):                                    # x: a vector per row
        z, xBC, dt = p.linear(x, self.in_proj).split(...)       # matrices
        u, B, C = p.conv(xBC, self.conv1d, "conv").split(...)   # a window of the state
        y = p.scan(u, dt, B, C, ...)                            # a recurrence
        return p.linear(p.gated_norm(y, z, self.norm, gate_first=True), self.out_proj)

Nothing is computed while a program is recorded: a Vector is a place for the numbers of one token.
An instruction is a frozen record of vectors, tensors, modules, numbers and names of state tensors;
amor/decode/walk.cpp has a struct of the same name and order for each, and calls the operator's
one-token kernel (ops/<op>/step.h). A layer that cannot be recorded (wrapped, hooked, or without a
program) raises `NoProgramError`, and decode runs its own forward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor, nn

from amor.parts import Linear, RMSNorm, ShortConv, SwiGLU, touched


class NoProgramError(Exception):
    """Raised for a layer that has no program, with the reason."""


@dataclass(frozen=True)
class Vector:
    """The place of [rows, width] numbers in scratch memory or in an input buffer of a program."""

    buffer: int  # SCRATCH, or the index of an input
    scratch_offset: int  # in scratch memory: numbers per row before the first row
    row_stride: int  # numbers from one row to the next
    offset: int  # of the first number within a row
    width: int

    def split(self, *widths: int) -> tuple[Vector, ...]:
        """Consecutive parts of it; the widths add up to its own."""
        assert sum(widths) == self.width, f"{widths} of {self.width}"
        starts = [sum(widths[:i]) for i in range(len(widths))]
        return tuple(replace(self, offset=self.offset + a, width=w) for a, w in zip(starts, widths))


@dataclass(frozen=True)
class StateRef:
    """A tensor of the layer's part of the State, updated in place; theta > 0: keys and values."""

    part: int  # index of the layer
    name: str
    shape: tuple[int, ...]  # of one row
    theta: float = 0.0  # base of the rotary frequencies of keys [heads, size]


# Instructions. Fields are those of a C++ struct, in the same order: Vector, Tensor (None: null),
# StateRef, int, float, Linears.


@dataclass(frozen=True)
class ProductOp:
    """out = W x, for matrices side by side."""

    kind: ClassVar[int] = 0
    x: Vector
    out: Vector
    add: int  # out += instead of out =
    layers: tuple[nn.Linear, ...]  # their outputs side by side


@dataclass(frozen=True)
class NormOp:
    """RMS norm of the whole vector, or of its heads."""

    kind: ClassVar[int] = 1
    x: Vector
    out: Vector
    weight: Tensor  # [size]
    size: int  # of one normed vector: a head's, or the whole width
    eps: float


@dataclass(frozen=True)
class GatedNormOp:
    """RMS norm of x gated by silu(z), before or after the norm."""

    kind: ClassVar[int] = 2
    x: Vector
    z: Vector
    out: Vector
    weight: Tensor
    size: int
    gate_first: int
    eps: float


@dataclass(frozen=True)
class GateOp:
    """out = x act(z), act SiLU (0) or the sigmoid (1)."""

    kind: ClassVar[int] = 3
    x: Vector
    z: Vector
    out: Vector
    act: int


@dataclass(frozen=True)
class AddOp:
    """out = x + scale y, with a scale per channel, or 1."""

    kind: ClassVar[int] = 4
    x: Vector
    y: Vector
    out: Vector
    scale: Tensor | None


@dataclass(frozen=True)
class ConvOp:
    """Short causal convolution over the window of the state and the new token, then SiLU."""

    kind: ClassVar[int] = 5
    x: Vector
    out: Vector
    taps: Tensor  # [taps, channels]
    bias: Tensor | None
    window: StateRef
    reach: int  # taps - 1


@dataclass(frozen=True)
class ScanOp:
    """One step of the Mamba2 recurrence."""

    kind: ClassVar[int] = 6
    u: Vector
    dt: Vector
    B: Vector
    C: Vector
    out: Vector
    A: Tensor  # [heads] < 0
    D: Tensor
    dt_bias: Tensor
    state: StateRef
    heads: int
    size: int
    groups: int
    states: int  # width of B and C per group


@dataclass(frozen=True)
class DeltaOp:
    """One step of the gated delta rule."""

    kind: ClassVar[int] = 7
    q: Vector
    k: Vector
    v: Vector
    a: Vector  # [heads] or [heads * size]: a decay per head, or per channel
    b: Vector
    out: Vector
    A: Tensor  # [heads] < 0
    dt_bias: Tensor  # as a
    state: StateRef
    heads: int
    size: int  # of a key
    value: int
    rates: int  # decays per head: 1 or size


@dataclass(frozen=True)
class KeysOp:
    """Writes the rotated key and the value of the new token to its slot."""

    kind: ClassVar[int] = 8
    k: Vector
    v: Vector
    kv: StateRef
    heads: int
    size: int


@dataclass(frozen=True)
class AttendOp:
    """Attention of the rotated query over all keys of its row up to its own."""

    kind: ClassVar[int] = 9
    q: Vector
    out: Vector
    kv: StateRef
    heads: int
    size: int


@dataclass(frozen=True)
class DotOp:
    """One number: weight . x + bias."""

    kind: ClassVar[int] = 10
    x: Vector
    out: Vector
    weight: Tensor  # [width]
    bias: Tensor | None  # one number


@dataclass(frozen=True)
class SiluDotOp:
    """out += weight . silu(x + bias): the output of a hidden layer."""

    kind: ClassVar[int] = 11
    x: Vector
    out: Vector
    bias: Tensor  # [width]
    weight: Tensor  # [width]


@dataclass(frozen=True)
class HeadOp:
    """out = shift + statistic / divisor, of the head's distribution after a column of the residual.

    Rows whose column was read since their last firing are not read again; one pass over the head
    reads this column and later ones where it takes few vectors.
    """

    kind: ClassVar[int] = 12
    h: Vector  # the residual
    out: Vector
    column: int
    last: int  # the column whose logits the step returns
    stat: int  # index in STATISTICS
    count: int  # columns that one pass may read
    shift: float
    divisor: float
    most: int  # vectors of one pass, where it reads more than one column
    columns: Tensor  # [count] their numbers
    norms: Tensor  # [count, width] weights of their norms
    eps: Tensor  # [count] of their norms; negative: no norm
    layers: tuple[nn.Linear, ...]  # the head


@dataclass(frozen=True)
class FireOp:
    """Rows whose score exceeds the threshold fire: the body computes their residual after a block.

    Where `given` is not NaN it is the decision, 0 or 1.
    """

    kind: ClassVar[int] = 13
    h: Vector  # the residual, changed in place
    x: Vector
    score: Vector
    threshold: Vector
    given: Vector
    fire: Vector  # 1 or 0, written
    scratch: int  # scratch numbers per row of the body
    body: tuple[Instruction, ...]  # inputs: h, x, the residual after the block


STATISTICS = ("entropy", "margin")  # of the head, as walk.cpp numbers them

Instruction = (
    ProductOp
    | NormOp
    | GatedNormOp
    | GateOp
    | AddOp
    | ConvOp
    | ScanOp
    | DeltaOp
    | KeysOp
    | AttendOp
    | DotOp
    | SiluDotOp
    | HeadOp
    | FireOp
)
INSTRUCTIONS: tuple[type[Instruction], ...] = get_args(Instruction)
SCRATCH = -1


class Program:
    """Records instructions; `inputs` are buffers that a call hands in, of the given widths."""

    def __init__(self, *widths: int):
        self.inputs = [Vector(i, 0, width, 0, width) for i, width in enumerate(widths)]
        self.instructions: list[Instruction] = []
        self.scratch_size = 0  # numbers per row
        self.part = 0  # index of the layer being recorded, and of its part of the State
        self._used = 0
        # records a statistic of the head for the gate being recorded, as `head` below
        self.read_head: Callable[[str, Vector, float, float], None] | None = None

    def layer(self, part: int) -> None:
        """Begin another layer: scratch vectors of the last one may be overwritten."""
        self.part, self._used = part, 0

    def vector(self, width: int) -> Vector:
        """A place in scratch memory, aligned to a cache line."""
        vector = Vector(SCRATCH, self._used, width, 0, width)
        self._used += -(-width // 16) * 16
        self.scratch_size = max(self.scratch_size, self._used)
        return vector

    def linear(self, x: Vector, *layers: nn.Linear) -> Vector:
        """Matrices with one input: their outputs side by side."""
        for layer in layers:
            require_unwrapped(layer)
        out = self.vector(sum(layer.weight.shape[0] for layer in layers))
        self.instructions.append(ProductOp(x, out, 0, layers))
        return out

    def norm(
        self, x: Vector, norm: RMSNorm, scale: Tensor | None = None, out: Vector | None = None
    ) -> Vector:
        """RMS norm of the whole vector, or of heads as wide as the norm; `scale` is multiplied into
        its weights.
        """
        require_unwrapped(norm)
        weight = norm.weight if scale is None else norm.weight.detach().float() * scale
        out = out or self.vector(x.width)
        self.instructions.append(NormOp(x, out, weight, weight.numel(), norm.eps))
        return out

    def unit_norm(self, x: Vector, size: int, length: float, eps: float) -> Vector:
        """Heads of `size` scaled to a length: eps is added to the mean of squares."""
        out = self.vector(x.width)
        self.instructions.append(
            NormOp(x, out, torch.full((size,), length * size**-0.5), size, eps)
        )
        return out

    def gated_norm(self, x: Vector, z: Vector, norm: RMSNorm, gate_first: bool) -> Vector:
        """RMS norm of x gated by silu(z), before (gate_first) or after the norm."""
        require_unwrapped(norm)
        out = self.vector(x.width)
        self.instructions.append(
            GatedNormOp(x, z, out, norm.weight, norm.weight.numel(), int(gate_first), norm.eps)
        )
        return out

    def gate(self, x: Vector, z: Vector, act: Literal["silu", "sigmoid"]) -> Vector:
        """x act(z)."""
        out = self.vector(x.width)
        self.instructions.append(GateOp(x, z, out, ("silu", "sigmoid").index(act)))
        return out

    def swiglu(self, x: Vector, mlp: SwiGLU) -> Vector:
        """The MLP of a layer."""
        require_unwrapped(mlp)
        gate, up = self.linear(x, mlp.gate_proj, mlp.up_proj).split(
            *(2 * [mlp.gate_proj.weight.shape[0]])
        )
        return self.linear(self.gate(up, gate, "silu"), mlp.down_proj)

    def add(
        self, x: Vector, y: Vector, scale: Tensor | None = None, out: Vector | None = None
    ) -> Vector:
        """x + scale y; scale per channel, None: 1."""
        out = out or self.vector(x.width)
        self.instructions.append(AddOp(x, y, out, scale))
        return out

    def accumulate(self, h: Vector, y: Vector) -> None:
        """h += y; where y is the output of the last product, the product adds to h itself."""
        last = self.instructions[-1]
        if isinstance(last, ProductOp) and last.out == y:
            self.instructions[-1] = replace(last, out=h, add=1)
        else:
            self.add(h, y, out=h)

    def conv(self, x: Vector, conv: ShortConv, name: str) -> Vector:
        """Short convolution over the window `name` of the State."""
        require_unwrapped(conv)
        out, taps = self.vector(x.width), conv.weight.detach()[:, 0].T.contiguous()
        reach = len(taps) - 1
        self.instructions.append(
            ConvOp(x, out, taps, conv.bias, self.state_ref(name, reach, x.width), reach)
        )
        return out

    def scan(
        self,
        u: Vector,
        dt: Vector,
        B: Vector,
        C: Vector,
        A: Tensor,
        D: Tensor,
        dt_bias: Tensor,
        groups: int,
        name: str,
    ) -> Vector:
        """The Mamba2 recurrence; dt as projected, A < 0 per head."""
        out, heads = self.vector(u.width), A.numel()
        size, states = u.width // heads, B.width // groups
        ref = self.state_ref(name, heads, size, states)
        self.instructions.append(
            ScanOp(u, dt, B, C, out, A, D, dt_bias, ref, heads, size, groups, states)
        )
        return out

    def delta(
        self,
        q: Vector,
        k: Vector,
        v: Vector,
        a: Vector,
        b: Vector,
        A: Tensor,
        dt_bias: Tensor,
        name: str,
    ) -> Vector:
        """The gated delta rule; a and b as projected, A < 0 per head.

        a and dt_bias: per head, or per channel of its keys.
        """
        out, heads = self.vector(v.width), A.numel()
        size, value = k.width // heads, v.width // heads
        ref = self.state_ref(name, heads, size, value)
        self.instructions.append(
            DeltaOp(q, k, v, a, b, out, A, dt_bias, ref, heads, size, value, a.width // heads)
        )
        return out

    def keys(self, k: Vector, v: Vector, size: int, theta: float, name: str) -> None:
        """Rotated keys and values into the State."""
        heads = k.width // size
        self.instructions.append(
            KeysOp(k, v, self.state_ref(name, heads, size, theta=theta), heads, size)
        )

    def attend(self, q: Vector, size: int, theta: float, name: str) -> Vector:
        """Attention over the keys of the State, with rotated queries."""
        out, heads = self.vector(q.width), q.width // size
        self.instructions.append(
            AttendOp(q, out, self.state_ref(name, heads, size, theta=theta), heads, size)
        )
        return out

    def dot(
        self, x: Vector, weight: Tensor, bias: Tensor | None = None, out: Vector | None = None
    ) -> Vector:
        """weight . x + bias, one number per row."""
        out = out or self.vector(1)
        self.instructions.append(DotOp(x, out, weight, bias))
        return out

    def silu_dot(self, x: Vector, bias: Tensor, weight: Tensor, out: Vector) -> None:
        """out += weight . silu(x + bias), one number per row."""
        self.instructions.append(SiluDotOp(x, out, bias, weight))

    def head(self, name: str, out: Vector, shift: float = 0.0, sign: float = 1.0) -> None:
        """out = shift + sign * statistic of the head for the probe vector of a gate.

        name: "entropy" (over log(vocab)) or "margin", as in Evidence; sign: 1 or -1.
        """
        if self.read_head is None:
            raise NoProgramError(f"{name} needs a reading of the head")
        self.read_head(name, out, shift, sign)

    def fire(self, block: Program, h: Vector, x: Vector, *decision: Vector) -> None:
        """Run the program of a block for rows that fire; decision: the fields of a FireOp."""
        score, threshold, given, fire = decision
        self.instructions.append(
            FireOp(
                *(h, x, score, threshold, given, fire),
                block.scratch_size,
                tuple(block.instructions),
            )
        )

    def state_ref(self, name: str, *shape: int, theta: float = 0.0) -> StateRef:
        """A tensor of this layer's part of the State."""
        return StateRef(self.part, name, shape, theta)


PLAIN = (Linear, RMSNorm, ShortConv, SwiGLU)


def require_unwrapped(module: nn.Module) -> None:
    """Refuse a module that is more than its weights: replaced, wrapped by an adapter, or hooked."""
    if type(module) not in PLAIN:
        expected = " or ".join(cls.__name__ for cls in PLAIN)
        raise NoProgramError(f"{type(module).__name__} stands where {expected} is expected")
    if touched(module):
        raise NoProgramError(touched(module))


def require_program(module: nn.Module) -> None:
    """Refuse a module without a program of its own forward, or with a hook on any part of it."""
    cls = type(module)
    if not hasattr(cls, "program"):
        raise NoProgramError(f"{cls.__name__} states no program")
    forward, program = (
        next(base for base in cls.__mro__ if name in vars(base)) for name in ("forward", "program")
    )
    if not issubclass(program, forward):
        raise NoProgramError(
            f"{cls.__name__} has a forward of its own, and only {program.__name__}'s program"
        )
    for part in module.modules():
        if touched(part):
            raise NoProgramError(touched(part))
