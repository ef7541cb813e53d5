"""The fastest chunk length of each recurrence on this machine, measured at the shapes of the
presets.

`amor doctor --measure` runs this; amor.ops.chunks keeps the result and uses it in later runs.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from amor.models.build import build
from amor.ops import chunks
from amor.ops.backends import choice, module
from amor.presets import preset

TOKENS = 1024  # length of the measured sequence


def scan_inputs(tokens: int, heads: int, size: int, states: int) -> list[Tensor]:
    """x, dt, A, B, C of one row, as ops.scan takes them."""
    x, dt = torch.randn(1, tokens, heads, size), F.softplus(torch.randn(1, tokens, heads))
    B, C = (torch.randn(1, tokens, 1, states) for _ in range(2))
    return [x, dt, -torch.arange(1.0, heads + 1), B, C]


def delta_inputs(tokens: int, heads: int, keys: int, values: int) -> list[Tensor]:
    """q, k, v, g, beta of one row, as ops.delta takes them."""
    q, k = (F.normalize(torch.randn(1, tokens, heads, keys), dim=-1) for _ in range(2))
    g, beta = -torch.rand(1, tokens, heads), torch.rand(1, tokens, heads)
    return [q, k, torch.randn(1, tokens, heads, values), g, beta]


# operator -> (architecture that has its shapes, function that makes its inputs)
INPUTS: dict[str, tuple[str, Callable[..., list[Tensor]]]] = {
    "scan": ("mamba2", scan_inputs),
    "delta": ("gated-deltanet", delta_inputs),
}


def forward_backward(op: str, backend: str, inputs: Sequence[Tensor]) -> Callable[[int], None]:
    """A function that runs the operator forward and backward with a given chunk length."""
    leaves = [t.requires_grad_() for t in inputs]

    def run(chunk: int) -> None:
        y, _ = getattr(module(op, backend), op)(*leaves, chunk=chunk)
        torch.autograd.grad(y, leaves, torch.ones_like(y))

    return run


@dataclass(frozen=True)
class ChunkTiming:
    """The chunk lengths of one operator at one scale, timed."""

    operator: str
    backend: str
    scale: str
    shape: tuple[int, ...]  # of the state, without the batch
    tokens: int
    threads: int
    was: int  # chunk length in use before
    chunk: int  # the fastest
    seconds: dict[int, float]  # chunk length -> seconds, forward and backward


def measure_chunks(scale: str, rounds: int = 15) -> Iterator[ChunkTiming]:
    """Time every chunk length of every operator that has chunks, at the shapes of one scale."""
    for op, (name, inputs) in INPUTS.items():
        backend = choice(op, "cpu")[0]
        if (op, backend) not in chunks.DEFAULT:  # the reference has no chunks
            continue
        part = build(preset(name, scale), device="meta").start(1).parts[0][op]
        assert isinstance(part, Tensor)
        shape = tuple(part.shape[1:])  # a state is [rows, heads, size, size]
        before = chunks.chunk_size(op, backend, TOKENS, shape)
        run = forward_backward(op, backend, inputs(TOKENS, *shape))
        run(before)  # the first call also builds and allocates
        seconds = chunks.measure(op, backend, shape, run, rounds)
        best = min(seconds, key=lambda c: seconds[c])
        threads = torch.get_num_threads()
        yield ChunkTiming(op, backend, scale, shape, TOKENS, threads, before, best, seconds)
