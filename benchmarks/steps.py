"""A whole training step (forward, backward, AdamW) of the eight architectures beside transformers'
models.

Each is compared with a Mamba2 of equally many parameters, the Transformer also with a Llama of its
shape. A Mamba2 of so many parameters has no whole number of layers, so the two nearest depths are
timed and the time is interpolated.
"""

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from amor.bench.table import BenchmarkRow, BenchmarkTable
from amor.bench.timing import Timings, alternate, combined
from amor.models.amor import Amor
from amor.models.build import build
from amor.presets import NAMES, SCALES, preset
from benchmarks import peer_models

MAMBA2, LLAMA = "transformers Mamba2", "transformers Llama"


def step(model: nn.Module, loss: Callable[[], Tensor]) -> Callable[[], None]:
    """A function that takes one training step, with our trainer's optimiser at a learning rate of
    0, so that gates fire alike in every step."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=0.0, fused=True)

    def work() -> None:
        optimiser.zero_grad()
        loss().backward()
        optimiser.step()

    return work


def our_loss(model: Amor, tokens: Tensor) -> Tensor:
    """The loss of one of our models on tokens [B, T + 1]."""
    loss = model(tokens[:, :-1], targets=tokens[:, 1:]).loss
    assert loss is not None
    return loss


@torch.no_grad()
def initialise_gates(model: Amor, tokens: Tensor) -> dict[str, float]:
    """Set the gates' statistics from a batch, as the first step of a training does; the firing rate
    of every block."""
    model.observe([gate.score.flatten() for gate in model(tokens[:, :-1]).gates])
    gates = model(tokens[:, :-1]).gates
    rates = [float(gate.fire.float().mean()) for gate in gates]
    return {f"firing rate of block {k}": rate for k, rate in enumerate(rates)}


def their_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """The loss of a model of transformers on tokens [B, T]."""
    return model(input_ids=tokens, labels=tokens).loss


def parameters(model: nn.Module) -> int:
    """How many parameters a model has."""
    return sum(p.numel() for p in model.parameters())


def training(
    table: BenchmarkTable, rounds: int, scale: str, rows: int, length: int
) -> BenchmarkRow:
    """A step of every architecture and of its peers, on `rows` rows of `length` tokens."""
    size = SCALES[scale]
    shape = {
        "scale": scale,
        "rows": rows,
        "length": length,
        "vocab": size["vocab"],
        "width": size["width"],
    }
    row = table.row("training step", "scan", "delta", "conv", "head", **shape)
    tokens = torch.randint(0, size["vocab"], (rows, length + 1))
    ours = {name: build(preset(name, scale)) for name in NAMES}
    for name, model in ours.items():
        rates = initialise_gates(model, tokens)
        row.numbers |= {f"{what}, {name}": rate for what, rate in rates.items()}
    width, vocab = size["width"], size["vocab"]
    depths = {n: peer_models.mamba2_depth(parameters(m), width, vocab) for n, m in ours.items()}
    whole = sorted({n for depth in depths.values() for n in (math.floor(depth), math.ceil(depth))})
    peers = {f"{MAMBA2} x {n}": peer_models.mamba2(width, n, vocab) for n in whole}
    peers[LLAMA] = peer_models.llama(width, size["depth"], size["d_ff"], vocab)
    sides = {name: step(model, partial(our_loss, model, tokens)) for name, model in ours.items()}
    read = tokens[:, :-1]
    sides |= {name: step(peer, partial(their_loss, peer, read)) for name, peer in peers.items()}
    row.times |= alternate(sides, rounds)
    row.numbers |= {f"parameters, {n}": parameters(m) for n, m in {**ours, **peers}.items()}
    for name, depth in depths.items():
        row.numbers[f"tokens/s, {name}"] = rows * length / row.seconds[name]
        row.add_ratio(f"{name} over {MAMBA2}", at_depth(row, depth), row.times[name])
    row.add_ratio(f"transformer over {LLAMA}", row.times[LLAMA], row.times["transformer"])
    return row


def at_depth(row: BenchmarkRow, depth: float) -> Timings:
    """Seconds of a Mamba2 of a fractional depth, interpolated between the two whole ones."""
    low, high = (row.times[f"{MAMBA2} x {n}"] for n in (math.floor(depth), math.ceil(depth)))
    return combined(lambda a, b: a + (depth - math.floor(depth)) * (b - a), low, high)
