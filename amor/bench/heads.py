"""The head's two large jobs, loss with gradient and entropy, against dense torch: time and memory."""

from functools import partial

import torch
import torch.nn.functional as F

from amor.bench import machine
from amor.bench.memory import extra_peak
from amor.bench.table import Row, Table
from amor.bench.timing import alternate
from amor.ops import head


def loss(table: Table, rounds: int, vocab: int, width: int, tokens: int, chunked_by_torch: bool = False) -> Row:
    row = table.row("loss and gradient", "head", tokens=tokens, vocab=vocab, width=width)
    x = torch.randn(tokens, width, requires_grad=True)
    weight = (torch.randn(vocab, width) * 0.02).requires_grad_()
    targets, target_weight = torch.randint(0, vocab, (tokens,)), torch.full((tokens,), 1 / tokens)

    def dense() -> None:
        x.grad = weight.grad = None
        F.cross_entropy(x @ weight.T, targets).backward()

    def ours() -> None:
        x.grad = weight.grad = None
        head.loss(x, weight, targets, target_weight)[0].backward()

    def linear_cross_entropy() -> None:
        x.grad = weight.grad = None
        F.linear_cross_entropy(x, weight, targets, options=torch.nn.LinearCrossEntropyOptions()).backward()

    row.time(alternate({"amor": ours, "dense": dense}, rounds))
    if chunked_by_torch:
        row.time(alternate({"torch linear_cross_entropy": linear_cross_entropy}, 1))
    gradients = (x.nbytes + weight.nbytes) / 2**20
    for name, work in (("amor", ours), ("dense", dense)):
        x.grad = weight.grad = None
        peak = extra_peak(work)
        if peak is not None:
            row.found[f"extra peak of the loss with gradients, MB, {name}"] = peak / 2**20
            row.found[f"extra peak of the loss, MB, {name}"] = peak / 2**20 - gradients
    row.found["share of GEMM rate"] = 6 * tokens * vocab * width / row.seconds["amor"] / 1e9 / machine.gemm_rate()
    row.ratio("time of the loss over dense", row.times["amor"], row.times["dense"])
    return row


@torch.no_grad()
def entropy(table: Table, rounds: int, vocab: int, width: int, tokens: int) -> Row:
    row = table.row("entropy", "head", tokens=tokens, vocab=vocab, width=width)
    x, weight = torch.randn(tokens, width), torch.randn(vocab, width) * 0.02
    whole = torch.zeros(tokens, vocab)  # touched before, so that the bare product does not pay for its pages

    def ours() -> None:
        head.read(x, weight, entropy=True)

    row.time(alternate({"amor": ours, "bare product": partial(torch.mm, x, weight.T, out=whole)}, rounds))
    del whole
    peak = extra_peak(ours)
    if peak is not None:
        row.found["extra peak of entropy, MB"] = peak / 2**20
    row.found["share of GEMM rate"] = 2 * tokens * vocab * width / row.seconds["amor"] / 1e9 / machine.gemm_rate()
    row.ratio("time of entropy over the bare product", row.times["amor"], row.times["bare product"])
    return row
