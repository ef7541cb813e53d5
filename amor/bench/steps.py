"""A whole training step (forward, backward, AdamW) of the eight architectures beside transformers' models.

Each stands beside a Mamba2 of its own number of parameters, the Transformer also beside a Llama of its shape. A Mamba2 of so
many parameters has no whole number of layers, so those one layer shallower and deeper are timed, and time is read off between.
"""

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from amor.bench import transformers
from amor.bench.table import Row, Table
from amor.bench.timing import Times, alternate, combined, watch
from amor.models.amor import Amor
from amor.models.build import build
from amor.presets import NAMES, SCALES, preset

MAMBA2, LLAMA = "transformers Mamba2", "transformers Llama"
FULL = {"scale": "tiny", "rows": 16, "length": 256}  # the batch of the tiny recipes
QUICK = {"scale": "tiny", "rows": 1, "length": 16}


def step(model: nn.Module, loss: Callable[[], Tensor]) -> Callable[[], None]:
    """One step of training, with our trainer's optimiser; its rate is 0, so that gates fire alike in every step."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=0.0, fused=True)

    def work() -> None:
        optimiser.zero_grad()
        loss().backward()
        optimiser.step()

    return work


def our_loss(model: Amor, tokens: Tensor) -> Tensor:
    loss = model(tokens[:, :-1], targets=tokens[:, 1:]).loss
    assert loss is not None
    return loss


@torch.no_grad()
def meet(model: Amor, tokens: Tensor) -> dict[str, float]:
    """Let the gates meet the batch, as the first step of a training does; the share of tokens that fire, a block."""
    model.observe([gate.score.flatten() for gate in model(tokens[:, :-1]).gates])
    return {f"firing rate of block {k}": float(gate.fire.float().mean()) for k, gate in enumerate(model(tokens[:, :-1]).gates)}


def their_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    return model(input_ids=tokens, labels=tokens).loss


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def training(table: Table, rounds: int, scale: str, rows: int, length: int) -> Row:
    size = SCALES[scale]
    shape = {"scale": scale, "rows": rows, "length": length, "vocab": size["vocab"], "width": size["width"]}
    row = table.row("training step", "scan", "delta", "conv", "head", **shape)
    tokens = torch.randint(0, size["vocab"], (rows, length + 1))
    ours = {name: build(preset(name, scale)) for name in NAMES}
    for name, met in ours.items():
        row.found |= {f"{what}, {name}": rate for what, rate in meet(met, tokens).items()}
    depths = {name: transformers.mamba2_depth(parameters(m), size["width"], size["vocab"]) for name, m in ours.items()}
    whole = sorted({n for depth in depths.values() for n in (math.floor(depth), math.ceil(depth))})
    peers = {f"{MAMBA2} x {n}": transformers.mamba2(size["width"], n, size["vocab"]) for n in whole}
    peers[LLAMA] = transformers.llama(size["width"], size["depth"], size["d_ff"], size["vocab"])
    sides = {name: step(model, partial(our_loss, model, tokens)) for name, model in ours.items()}
    sides |= {name: step(model, partial(their_loss, model, tokens[:, :-1])) for name, model in peers.items()}
    for model in (*ours.values(), *peers.values()):
        watch(model)
    row.time(alternate(sides, rounds))
    for name, model in {**ours, **peers}.items():
        row.found[f"parameters, {name}"] = parameters(model)
    for name, depth in depths.items():
        row.found[f"tokens/s, {name}"] = rows * length / row.seconds[name]
        row.ratio(f"{name} over {MAMBA2}", between(row, depth), row.times[name])
    row.ratio(f"transformer over {LLAMA}", row.times[LLAMA], row.times["transformer"])
    return row


def between(row: Row, depth: float) -> Times:
    """Seconds of a Mamba2 of a depth that need not be whole."""
    low, high = (row.times[f"{MAMBA2} x {n}"] for n in (math.floor(depth), math.ceil(depth)))
    return combined(lambda a, b: a + (depth - math.floor(depth)) * (b - a), low, high)
