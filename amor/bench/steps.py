"""A whole training step (forward, backward, AdamW) of the eight architectures beside transformers' models."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from amor.bench import transformers
from amor.bench.table import Row, Table
from amor.bench.timing import alternate
from amor.models.amor import Amor
from amor.models.build import build
from amor.presets import NAMES, SCALES, preset

# what each architecture is measured against, and how much faster it has to be
BARS = dict.fromkeys(NAMES, ("transformers Mamba2", 3.0)) | {"transformer": ("transformers Llama", 1.0)}


def step(model: nn.Module, loss: Callable[[], Tensor]) -> Callable[[], None]:
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def work() -> None:
        optimiser.zero_grad()
        loss().backward()
        optimiser.step()

    return work


def our_loss(model: Amor, tokens: Tensor) -> Tensor:
    loss = model(tokens[:, :-1], targets=tokens[:, 1:]).loss
    assert loss is not None
    return loss


def their_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    return model(input_ids=tokens, labels=tokens).loss


def training(table: Table, rounds: int, scale: str, rows: int, length: int) -> Row:
    size = SCALES[scale]
    shape = {"scale": scale, "rows": rows, "length": length, "vocab": size["vocab"], "width": size["width"]}
    row = table.row("training step", "scan", "delta", "conv", "head", **shape)
    tokens = torch.randint(0, size["vocab"], (rows, length + 1))
    ours = {name: build(preset(name, scale)) for name in NAMES}
    count = {name: sum(p.numel() for p in model.parameters()) for name, model in ours.items()}
    peers = {
        "transformers Mamba2": transformers.mamba2_of(count["mamba2"], size["width"], size["vocab"]),
        "transformers Llama": transformers.llama(size["width"], size["depth"], size["d_ff"], size["vocab"]),
    }
    sides = {name: step(model, partial(our_loss, model, tokens)) for name, model in ours.items()}
    sides |= {name: step(model, partial(their_loss, model, tokens[:, :-1])) for name, model in peers.items()}
    row.time(alternate(sides, rounds))
    for name, peer in peers.items():
        row.found[f"parameters, {name}"] = sum(p.numel() for p in peer.parameters())
    for name in NAMES:
        peer_name, least = BARS[name]
        row.found[f"parameters, {name}"] = count[name]
        row.found[f"tokens/s, {name}"] = rows * length / row.seconds[name]
        table.bar(row, f"{name} over {peer_name}", row.seconds[peer_name] / row.seconds[name], at_least=least)
    return row
