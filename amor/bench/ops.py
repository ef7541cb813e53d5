"""Each operator beside torch's own form, and the share of the machine's ceiling that it reaches.

amor bench ops --only linear
"""

import argparse
import math
from collections.abc import Callable, Iterator
from functools import partial
from timeit import timeit
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from amor.bench import machine
from amor.bench.chunks import delta_inputs, scan_inputs
from amor.bench.table import BenchmarkRow, BenchmarkTable, common, run_rows
from amor.bench.timing import alternate
from amor.ops import attend, head, product
from amor.ops.conv import conv
from amor.ops.delta import delta
from amor.ops.linear import linear
from amor.ops.scan import scan

Sides = dict[str, Callable[[], Any]]


class OpShape(NamedTuple):
    """The sizes that the shapes of all operators follow from."""

    vocab: int
    width: int
    tokens: int


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the suite."""
    common(parser, ROWS)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure, print, and return the table for JSON."""
    shape = OpShape(512, 64, 64) if args.quick else OpShape(128_256, 768, 1024)
    return run_rows("ops", args, ROWS, lambda t, name: ROWS[name](t, args.rounds, shape))


def products(table: BenchmarkTable, rounds: int, shape: OpShape) -> Iterator[BenchmarkRow]:
    """A few rows times the head's matrix, in every weight format."""
    vocab, width, _ = shape
    weight = torch.randn(vocab, width) * 0.02
    packed = {kind: product.pack(weight, kind) for kind in product.FORMATS}
    for x in [torch.randn(count, width) for count in (1, 2, 4, 8, 32)]:
        sizes = {"rows": len(x), "vocab": vocab, "width": width}
        row = table.row("product with the head", "product", **sizes)
        sides: Sides = {"torch float32": partial(torch.matmul, x, weight.T)}
        for kind, m in packed.items():
            sides[f"amor {kind}"] = partial(product.product, x, m)
            sides[f"amor probe {kind}"] = partial(product.probe, x, m)
        row.times |= alternate(sides, rounds)
        for kind, m in packed.items():
            rate = m.nbytes / row.seconds[f"amor {kind}"] / 1e9
            row.numbers[f"share of bandwidth, {kind}"] = rate / machine.bandwidth()
        yield row


def layers(table: BenchmarkTable, rounds: int, shape: OpShape) -> Iterator[BenchmarkRow]:
    """A linear layer at the shapes of a training step at scale tiny, then at 180m."""
    _, width, tokens = shape
    tiny = 4 * tokens, width // 3, 2 * width // 3
    larger = (tokens, width, 4 * width), (tokens, 4 * width, width)
    for count, inner, outputs in (tiny, *larger):
        row = table.row("linear layer", "linear", tokens=count, inner=inner, outputs=outputs)
        x = torch.randn(count, inner, requires_grad=True)
        weight = torch.randn(outputs, inner, requires_grad=True)
        backward = partial(Tensor.backward, gradient=torch.randn(count, outputs))
        sides: Sides = {}
        for name, layer in (("amor", linear), ("torch", F.linear)):
            sides[f"{name}, forward"] = partial(_then, Tensor.detach, layer, x, weight)
            sides[f"{name}, forward and backward"] = partial(_then, backward, layer, x, weight)
        row.times |= alternate(sides, rounds)
        share = 2e-9 * weight.numel() * count / machine.gemm_rate()
        row.numbers["share of GEMM rate, forward"] = share / row.seconds["amor, forward"]
        both = row.seconds["amor, forward and backward"]
        row.numbers["share of GEMM rate, forward and backward"] = 3 * share / both
        yield row


def _then(work: Callable[[Tensor], Any], function: Callable[..., Tensor], *inputs: Any) -> Any:
    return work(function(*inputs))


def recurrences(table: BenchmarkTable, rounds: int, shape: OpShape) -> Iterator[BenchmarkRow]:
    """scan, delta and conv, forward, at the shapes of one layer."""
    _, width, tokens = shape
    heads, keys, channels = width // 32, max(1, 3 * width // 256), 2 * width + 256
    row = table.row("scan, forward", "scan", tokens=tokens, heads=heads, size=64, states=128)
    inputs = scan_inputs(tokens, heads, size=64, states=128)
    row.times |= alternate({"amor": partial(scan, *inputs)}, rounds)
    yield row
    row = table.row("delta, forward", "delta", tokens=tokens, heads=keys)
    inputs = delta_inputs(tokens, keys, keys=64, values=128)
    row.times |= alternate({"amor": partial(delta, *inputs)}, rounds)
    yield row
    row = table.row("conv, forward", "conv", tokens=tokens, channels=channels)
    inputs = [torch.randn(1, tokens, channels), torch.randn(channels, 4)]
    row.times |= alternate({"amor": partial(conv, *inputs)}, rounds)
    yield row


def attention(table: BenchmarkTable, rounds: int, shape: OpShape) -> Iterator[BenchmarkRow]:
    """One query against growing numbers of keys."""
    heads = shape.width // 64
    for length in (shape.tokens, 16 * shape.tokens, 64 * shape.tokens):
        k, v = (torch.randn(1, heads, length, 64) for _ in range(2))
        q, first = torch.randn(1, heads, 64), torch.zeros(1, dtype=torch.long)
        row = table.row("one query against all keys", "attend", keys=length, heads=heads)
        sides: Sides = {
            "amor": partial(attend.fired, q, k, v, first, torch.tensor([length])),
            "torch SDPA": partial(F.scaled_dot_product_attention, q[:, :, None], k, v),
        }
        repeats = max(1, 2**18 // length)  # a single call is too short to time
        many = {name: partial(timeit, work, number=repeats) for name, work in sides.items()}
        times = alternate(many, rounds)
        row.times |= {name: each.divided(repeats) for name, each in times.items()}
        rate = 2 * k.nbytes / row.seconds["amor"] / 1e9
        row.numbers["share of bandwidth"] = rate / machine.bandwidth()
        yield row


def heads(table: BenchmarkTable, rounds: int, shape: OpShape) -> list[BenchmarkRow]:
    """The LM head's two large jobs: loss with gradient, and entropy."""
    longer = shape._replace(tokens=3 * shape.tokens)
    return [loss(table, rounds, shape), entropy(table, rounds, longer)]


def loss_sides(vocab: int, width: int, tokens: int) -> tuple[Tensor, Tensor, Sides]:
    """x, the head's weight, and the loss with gradients computed by three sides."""
    x = torch.randn(tokens, width, requires_grad=True)
    weight = (torch.randn(vocab, width) * 0.02).requires_grad_()
    targets = torch.randint(0, vocab, (tokens,))
    share = torch.full((tokens,), 1 / tokens)

    def dense() -> None:
        x.grad = weight.grad = None
        F.cross_entropy(x @ weight.T, targets).backward()

    def ours() -> None:
        x.grad = weight.grad = None
        head.loss(x, weight, targets, share)[0].backward()

    def linear_cross_entropy() -> None:
        x.grad = weight.grad = None
        options = torch.nn.LinearCrossEntropyOptions()
        F.linear_cross_entropy(x, weight, targets, options=options).backward()

    sides = {"amor": ours, "dense": dense, "torch linear_cross_entropy": linear_cross_entropy}
    return x, weight, sides


def loss(table: BenchmarkTable, rounds: int, shape: OpShape) -> BenchmarkRow:
    """Loss and gradients of x and of the head, beside a dense torch loss and torch's chunked
    one."""
    row = table.row("loss and gradient", "head", **shape._asdict())
    *_, sides = loss_sides(*shape)
    chunked = sides.popitem()
    row.times |= alternate(sides, rounds)
    row.times |= alternate(dict([chunked]), 1)  # slow: one round
    rate = 6e-9 * math.prod(shape) / row.seconds["amor"]
    row.numbers["share of GEMM rate"] = rate / machine.gemm_rate()
    row.add_ratio("time of the loss over dense", row.times["amor"], row.times["dense"])
    return row


@torch.no_grad()
def entropy(table: BenchmarkTable, rounds: int, shape: OpShape) -> BenchmarkRow:
    """The entropy of the head's distribution per token, beside the matrix product alone."""
    vocab, width, tokens = shape
    row = table.row("entropy", "head", **shape._asdict())
    x, weight = torch.randn(tokens, width), torch.randn(vocab, width) * 0.02
    # touched here, so that the bare product pays for no page faults
    out = torch.zeros(tokens, vocab)
    sides: Sides = {
        "amor": lambda: head.read(x, weight, entropy=True),
        "bare product": partial(torch.mm, x, weight.T, out=out),
    }
    row.times |= alternate(sides, rounds)
    rate = 2e-9 * math.prod(shape) / row.seconds["amor"]
    row.numbers["share of GEMM rate"] = rate / machine.gemm_rate()
    ours, bare = row.times["amor"], row.times["bare product"]
    row.add_ratio("time of entropy over the bare product", ours, bare)
    return row


ROWS = {
    "product": products,
    "linear": layers,
    "recurrences": recurrences,
    "attention": attention,
    "head": heads,
}
