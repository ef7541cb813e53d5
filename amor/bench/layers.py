"""One layer, forward and backward, beside transformers' layer of the same shape and beside its own projections."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from amor.bench import machine, transformers
from amor.bench.memory import extra_peak
from amor.bench.table import Row, Table
from amor.bench.timing import alternate
from amor.layout import Layout
from amor.mixers.base import Mixer
from amor.mixers.gated_deltanet import GatedDeltaNet, GatedDeltaNetOptions
from amor.mixers.mamba2 import Mamba2, Mamba2Options
from amor.ops.scan import scan


def both_ways(forward: Callable[[Tensor], Tensor], x: Tensor) -> Callable[[], None]:
    """A call that goes forward and backward, gradients of input and parameters thrown away."""
    leaf = x.clone().requires_grad_()

    def work() -> None:
        y = forward(leaf)
        torch.autograd.backward(y, torch.ones_like(y))
        leaf.grad = None

    return work


def built(mixer: Mixer) -> Mixer:
    torch.manual_seed(0)
    for p in mixer.parameters():
        nn.init.normal_(p, 0, 0.02)
    mixer.reset_parameters(torch.Generator().manual_seed(0))
    return mixer


def mixed(mixer: Mixer, x: Tensor) -> Tensor:
    layout = Layout(torch.zeros(len(x), dtype=torch.long), x.shape[1], True, 0)
    return mixer(x, mixer.start(len(x), x.device, x.dtype), layout)[0]


def projected(layers: Sequence[nn.Linear], width: int, x: Tensor) -> Tensor:
    """Only the products of a layer: those that read x, then the one that writes the output."""
    *reading, writing = layers
    out = torch.cat([layer(x) for layer in reading], dim=-1)
    return writing(out[..., : writing.in_features])


def mamba2(table: Table, rounds: int, width: int, tokens: int) -> Row:
    row = table.row("Mamba2 layer, forward and backward", "scan", "conv", "gated_norm", tokens=tokens, width=width)
    x = torch.randn(1, tokens, width)
    ours = built(Mamba2(width, Mamba2Options(), 1e-5))
    assert isinstance(ours, Mamba2)
    sides = {"amor": both_ways(partial(mixed, ours), x)}
    sides["own projections"] = both_ways(partial(projected, [ours.in_proj, ours.out_proj], width), x)
    chunks = {chunk: both_ways(transformers.mamba2_layer(width, chunk), x) for chunk in (32, 64, 128, 256)}
    row.time(alternate(sides | {f"transformers, chunk {c}": side for c, side in chunks.items()}, rounds))
    theirs, mine = {c: row.times[f"transformers, chunk {c}"] for c in chunks}, row.times["amor"]
    flops = 6 * tokens * (ours.in_proj.weight.numel() + ours.out_proj.weight.numel())
    row.found["share of GEMM rate, products only"] = flops / mine.best / 1e9 / machine.gemm_rate()
    row.ratio("over transformers' default chunk", theirs[256], mine)
    row.ratio("over transformers' best chunk", min(theirs.values(), key=lambda taken: taken.median), mine)
    row.ratio("time over own projections", mine, row.times["own projections"])
    return row


def delta(table: Table, rounds: int, width: int, tokens: int) -> Row:
    row = table.row("Gated DeltaNet layer, forward and backward", "delta", "conv", tokens=tokens, width=width)
    x = torch.randn(1, tokens, width)
    ours = built(GatedDeltaNet(width, GatedDeltaNetOptions(), 1e-5))
    assert isinstance(ours, GatedDeltaNet)
    products = [ours.q_proj, ours.k_proj, ours.v_proj, ours.g_proj, ours.a_proj, ours.b_proj, ours.o_proj]
    sides = {
        "amor": both_ways(partial(mixed, ours), x),
        "transformers Qwen3-Next": both_ways(transformers.delta_layer(width, ours.heads), x),
        "own projections": both_ways(partial(projected, products, width), x),
    }
    row.time(alternate(sides, rounds))
    row.ratio("over transformers", row.times["transformers Qwen3-Next"], row.times["amor"])
    return row


def scan_both_ways(tokens: int, heads: int) -> Callable[[], None]:
    """A scan forward and backward whose gradients are thrown away with it."""
    inputs = [torch.randn(1, tokens, heads, 64), F.softplus(torch.randn(1, tokens, heads))]
    inputs += [torch.randn(1, tokens, 1, 128) for _ in range(2)]
    A = -torch.arange(1.0, heads + 1)

    def work() -> None:
        x, dt, B, C = (t.requires_grad_() for t in inputs)
        y, _ = scan(x, dt, A, B, C)
        torch.autograd.grad(y, (x, dt, B, C), torch.ones_like(y))

    return work


def scan_memory(table: Table, rounds: int, width: int, tokens: int) -> Row:
    heads = width // 32
    row = table.row("memory of the scan, forward and backward", "scan", tokens=f"{tokens} to {4 * tokens}", heads=heads)
    each = {}
    for length in (tokens, 2 * tokens, 4 * tokens):
        work = scan_both_ways(length, heads)
        work()  # what is made once, such as native code, is not the scan's
        peak = extra_peak(work)
        if peak is None:  # this system does not tell
            return row
        each[length] = peak / length / heads
        row.found[f"extra peak at {length} tokens, MB"] = peak / 2**20
        row.found[f"bytes a token and head at {length}"] = each[length]
    row.found["bytes a token, longest over shortest"] = each[4 * tokens] / max(each[tokens], 1)
    return row
