"""Each operator against its slow or torch form, with the share of the machine's ceiling it reaches."""

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from amor.bench import machine
from amor.bench.heads import entropy, loss
from amor.bench.table import Row, Table, common, named
from amor.bench.timing import alternate
from amor.ops import attend, product
from amor.ops.conv import conv
from amor.ops.delta import delta
from amor.ops.linear import linear
from amor.ops.scan import scan


def arguments(parser: argparse.ArgumentParser) -> None:
    common(parser, ROWS)


def run(args: argparse.Namespace) -> dict[str, Any]:
    table = Table.of("ops", args)
    vocab, width, tokens = (512, 64, 64) if args.quick else (128_256, 768, 1024)
    torch.manual_seed(0)
    for name in named(ROWS, args.only):
        table.ask(name)
        for row in ROWS[name](table, args.rounds, vocab, width, tokens):
            row.show()
    return table.result()


def products(table: Table, rounds: int, vocab: int, width: int, tokens: int) -> list[Row]:
    weight = torch.randn(vocab, width) * 0.02
    packed = {kind: product.pack(weight, kind) for kind in product.FORMATS}
    return [_product(table, rounds, weight, packed, torch.randn(count, width)) for count in (1, 2, 4, 8, 32)]


def _product(table: Table, rounds: int, weight: Tensor, packed: dict[str, product.Matrix], x: Tensor) -> Row:
    row = table.row("product with the head", "product", rows=len(x), vocab=len(weight), width=weight.shape[1])
    sides: dict[str, Callable[[], Any]] = {"torch float32": lambda: x @ weight.T}
    for kind, m in packed.items():
        sides[f"amor {kind}"] = partial(product.product, x, m)
        sides[f"amor probe {kind}"] = partial(product.probe, x, m)
    row.time(alternate(sides, rounds))
    for kind, m in packed.items():
        row.found[f"share of bandwidth, {kind}"] = m.nbytes / row.seconds[f"amor {kind}"] / 1e9 / machine.bandwidth()
    return row


def layers(table: Table, rounds: int, vocab: int, width: int, tokens: int) -> list[Row]:
    """A linear layer at the shapes of a tiny training step, and of the 180m one."""
    shapes = (4 * tokens, width // 3, 2 * width // 3), (tokens, width, 4 * width), (tokens, 4 * width, width)
    return [_layer(table, rounds, *shape) for shape in shapes]


def _layer(table: Table, rounds: int, tokens: int, inner: int, outputs: int) -> Row:
    row = table.row("linear layer", "linear", tokens=tokens, inner=inner, outputs=outputs)
    x, weight = torch.randn(tokens, inner, requires_grad=True), torch.randn(outputs, inner, requires_grad=True)
    along = torch.randn(tokens, outputs)
    sides: dict[str, Callable[[], Any]] = {}
    for name, layer in (("amor", linear), ("torch", F.linear)):
        sides[f"{name}, forward"] = partial(_then, Tensor.detach, layer, x, weight)
        sides[f"{name}, forward and backward"] = partial(_then, partial(Tensor.backward, gradient=along), layer, x, weight)
    row.time(alternate(sides, rounds))
    rate = 2e-9 * weight.numel() * tokens / machine.gemm_rate()
    row.found["share of GEMM rate, forward"] = rate / row.seconds["amor, forward"]
    row.found["share of GEMM rate, forward and backward"] = 3 * rate / row.seconds["amor, forward and backward"]
    return row


def recurrences(table: Table, rounds: int, vocab: int, width: int, tokens: int) -> list[Row]:
    heads, size, states = width // 32, 64, 128
    x, dt = torch.randn(1, tokens, heads, size), torch.rand(1, tokens, heads) * 0.1
    B, C = torch.randn(1, tokens, 1, states), torch.randn(1, tokens, 1, states)
    A = -torch.arange(1, heads + 1).float()
    scanned = table.row("scan, forward", "scan", tokens=tokens, heads=heads, size=size, states=states)
    scanned.time(alternate({"amor": lambda: scan(x, dt, A, B, C)}, rounds))
    keys = max(1, 3 * width // 256)
    q, k = (F.normalize(torch.randn(1, tokens, keys, 64), dim=-1) for _ in range(2))
    v, g, beta = torch.randn(1, tokens, keys, 128), -torch.rand(1, tokens, keys), torch.rand(1, tokens, keys)
    ruled = table.row("delta, forward", "delta", tokens=tokens, heads=keys)
    ruled.time(alternate({"amor": lambda: delta(q, k, v, g, beta)}, rounds))
    c, taps = torch.randn(1, tokens, 2 * width + 256), torch.randn(2 * width + 256, 4)
    convolved = table.row("conv, forward", "conv", tokens=tokens, channels=2 * width + 256)
    convolved.time(alternate({"amor": lambda: conv(c, taps)}, rounds))
    return [scanned, ruled, convolved]


def attention(table: Table, rounds: int, vocab: int, width: int, tokens: int) -> list[Row]:
    return [_attention(table, rounds, width // 64, length) for length in (tokens, 16 * tokens, 64 * tokens)]


def _attention(table: Table, rounds: int, heads: int, length: int) -> Row:
    k, v = (torch.randn(1, heads, length, 64) for _ in range(2))
    q, first, lengths = torch.randn(1, heads, 64), torch.zeros(1, dtype=torch.long), torch.tensor([length])
    row = table.row("one query against all keys", "attend", keys=length, heads=heads)
    sides = {
        "amor": lambda: attend.fired(q, k, v, first, lengths),
        "torch SDPA": lambda: F.scaled_dot_product_attention(q[:, :, None], k, v),
    }
    row.time(alternate(sides, rounds, least=0.01))
    row.found["share of bandwidth"] = 2 * k.nbytes / row.seconds["amor"] / 1e9 / machine.bandwidth()
    return row


def firing(table: Table, rounds: int, vocab: int, width: int, tokens: int) -> list[Row]:
    """Where gathering the fired queries stops paying: DENSE_ABOVE in amor/models/block.py is read off here."""
    size, length = 64, 3 * tokens
    q, k, v = (torch.randn(1, width // size, length, size, requires_grad=True) for _ in range(3))
    rows = []
    for title, work in (("forward", Tensor.detach), ("forward and backward", lambda out: out.sum().backward())):
        row = table.row(f"fired queries against dense, {title}", "attend", keys=length, heads=width // size)
        sides: dict[str, Callable[[], Any]] = {"dense": partial(_then, work, attend.dense, q, k, v, None, True)}
        for rate in (0.1, 0.22, 0.4, 0.6, 0.8, 1.0):
            at = torch.sort(torch.randperm(length)[: int(rate * length)]).values
            some, zero = q.detach()[0, :, at].transpose(0, 1).requires_grad_(), torch.zeros(len(at), dtype=torch.long)
            sides[f"fired {rate}"] = partial(_then, work, attend.fired, some, k, v, zero, at + 1)
        row.time(alternate(sides, rounds))
        rows.append(row)
    return rows


def _then(work: Callable[[Tensor], Any], function: Callable[..., Tensor], *given: Any) -> Any:
    return work(function(*given))


def heads(table: Table, rounds: int, vocab: int, width: int, tokens: int) -> list[Row]:
    return [loss(table, rounds, vocab, width, tokens, chunked_by_torch=True), entropy(table, rounds, vocab, width, 3 * tokens)]


ROWS = {
    "product": products,
    "linear": layers,
    "recurrences": recurrences,
    "attention": attention,
    "firing": firing,
    "head": heads,
}
