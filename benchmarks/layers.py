"""One layer, forward and backward: beside transformers' layer of the same shape, and beside its own
projections alone."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from amor.bench import machine
from amor.bench.table import BenchmarkRow, BenchmarkTable
from amor.bench.timing import alternate
from amor.layout import Layout
from amor.mixers.base import Mixer
from amor.mixers.gated_deltanet import GatedDeltaNet, GatedDeltaNetOptions
from amor.mixers.mamba2 import Mamba2, Mamba2Options
from benchmarks import peer_models


def forward_backward(forward: Callable[[Tensor], Tensor], x: Tensor) -> Callable[[], None]:
    """A function that runs a layer forward and backward and drops the gradient of its input."""
    leaf = x.clone().requires_grad_()

    def work() -> None:
        y = forward(leaf)
        torch.autograd.backward(y, torch.ones_like(y))
        leaf.grad = None

    return work


def initialised(mixer: Mixer) -> Mixer:
    """A mixer with fresh weights."""
    torch.manual_seed(0)
    for p in mixer.parameters():
        nn.init.normal_(p, 0, 0.02)
    mixer.reset_parameters(torch.Generator().manual_seed(0))
    return mixer


def apply_mixer(mixer: Mixer, x: Tensor) -> Tensor:
    """A mixer on x [B, T, D] from a fresh state -> [B, T, D]."""
    layout = Layout(torch.zeros(len(x), dtype=torch.long), x.shape[1], True, 0)
    return mixer(x, mixer.start(len(x), x.device, x.dtype), layout)[0]


def project(layers: Sequence[nn.Linear], x: Tensor) -> Tensor:
    """Only the matrix products of a layer: those of its input, then the one that writes its
    output."""
    *reading, writing = layers
    out = torch.cat([layer(x) for layer in reading], dim=-1)
    return writing(out[..., : writing.in_features])


def mamba2(table: BenchmarkTable, rounds: int, width: int, tokens: int) -> BenchmarkRow:
    """Our Mamba2 layer beside transformers' with several chunk lengths."""
    what, ops = "Mamba2 layer, forward and backward", ("scan", "conv", "gated_norm")
    row = table.row(what, *ops, tokens=tokens, width=width)
    x = torch.randn(1, tokens, width)
    ours = initialised(Mamba2(width, Mamba2Options(), 1e-5))
    assert isinstance(ours, Mamba2)
    sides = {"amor": forward_backward(partial(apply_mixer, ours), x)}
    sides["own projections"] = forward_backward(partial(project, [ours.in_proj, ours.out_proj]), x)
    chunks = {
        chunk: forward_backward(peer_models.mamba2_layer(width, chunk), x)
        for chunk in (32, 64, 128, 256)
    }
    row.times |= alternate(
        sides | {f"transformers, chunk {c}": side for c, side in chunks.items()}, rounds
    )
    theirs = {c: row.times[f"transformers, chunk {c}"] for c in chunks}
    mine = row.times["amor"]
    flops = 6 * tokens * (ours.in_proj.weight.numel() + ours.out_proj.weight.numel())
    rate = flops / mine.best / 1e9
    row.numbers["share of GEMM rate, products only"] = rate / machine.gemm_rate()
    row.add_ratio("over transformers' default chunk", theirs[256], mine)
    best = min(theirs.values(), key=lambda times: times.median)
    row.add_ratio("over transformers' best chunk", best, mine)
    row.add_ratio("time over own projections", mine, row.times["own projections"])
    return row


def delta(table: BenchmarkTable, rounds: int, width: int, tokens: int) -> BenchmarkRow:
    """Our Gated DeltaNet layer beside the one of Qwen3-Next."""
    what = "Gated DeltaNet layer, forward and backward"
    row = table.row(what, "delta", "conv", tokens=tokens, width=width)
    x = torch.randn(1, tokens, width)
    ours = initialised(GatedDeltaNet(width, GatedDeltaNetOptions(), 1e-5))
    assert isinstance(ours, GatedDeltaNet)
    reading = [ours.q_proj, ours.k_proj, ours.v_proj, ours.g_proj, ours.a_proj, ours.b_proj]
    products = [*reading, ours.o_proj]
    sides = {
        "amor": forward_backward(partial(apply_mixer, ours), x),
        "transformers Qwen3-Next": forward_backward(peer_models.delta_layer(width, ours.heads), x),
        "own projections": forward_backward(partial(project, products), x),
    }
    row.times |= alternate(sides, rounds)
    row.add_ratio("over transformers", row.times["transformers Qwen3-Next"], row.times["amor"])
    return row
