"""Which chunk of a recurrence is fastest here: measured at the presets' shapes, kept where amor.ops.chunks reads it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from amor.models.build import build
from amor.ops import chunks
from amor.ops.backends import choice, module
from amor.presets import preset

TOKENS = 1024


def scan_inputs(heads: int, size: int, states: int) -> list[Tensor]:
    """x, dt, A, B, C"""
    decays = -torch.arange(1.0, heads + 1)
    B, C = (torch.randn(1, TOKENS, 1, states) for _ in range(2))
    return [torch.randn(1, TOKENS, heads, size), F.softplus(torch.randn(1, TOKENS, heads)), decays, B, C]


def delta_inputs(heads: int, keys: int, values: int) -> list[Tensor]:
    """q, k, v, g, beta"""
    q, k = (F.normalize(torch.randn(1, TOKENS, heads, keys), dim=-1) for _ in range(2))
    return [q, k, torch.randn(1, TOKENS, heads, values), -torch.rand(1, TOKENS, heads), torch.rand(1, TOKENS, heads)]


# operator -> (the architecture whose shapes it has, its inputs)
MADE: dict[str, tuple[str, Callable[..., list[Tensor]]]] = {
    "scan": ("mamba2", scan_inputs),
    "delta": ("gated-deltanet", delta_inputs),
}


def both_ways(op: str, backend: str, inputs: Sequence[Tensor]) -> Callable[[int], None]:
    """A call takes the operator forward and backward with a chunk."""
    leaves = [t.requires_grad_() for t in inputs]

    def run(chunk: int) -> None:
        y, _ = getattr(module(op, backend), op)(*leaves, chunk=chunk)
        torch.autograd.grad(y, leaves, torch.ones_like(y))

    return run


@dataclass(frozen=True)
class Fastest:
    """An operator at a scale: its shape, the chunk that was in use, the fastest, and the seconds of each."""

    operator: str
    backend: str
    scale: str
    shape: tuple[int, ...]
    tokens: int
    threads: int
    was: int
    chunk: int
    seconds: dict[int, float]


def measured(scale: str, rounds: int = 15) -> list[Fastest]:
    """A row an operator."""
    found = []
    for op, (name, made) in MADE.items():
        backend = choice(op, "cpu")[0]
        if (op, backend) not in chunks.DEFAULT:  # the reference has no chunks
            continue
        part = build(preset(name, scale), device="meta").start(1).parts[0][op]
        assert isinstance(part, Tensor)
        shape = tuple(part.shape[1:])  # a state is [rows, heads, size, size]
        before = chunks.chunk_size(op, backend, TOKENS, shape)
        run = both_ways(op, backend, made(*shape))
        run(before)  # the first call also builds and allocates
        seconds = chunks.measure(op, backend, shape, run, rounds)
        best = min(seconds, key=lambda c: seconds[c])
        found.append(Fastest(op, backend, scale, shape, TOKENS, torch.get_num_threads(), before, best, seconds))
    return found
