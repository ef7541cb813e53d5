"""Decode and prefill of a Mamba2 without MLP: beside transformers' generate, memory bandwidth and
the model's own matrix products."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from amor.bench import machine
from amor.bench.table import BenchmarkRow, BenchmarkTable
from amor.bench.timing import alternate, combined
from amor.decode.engine import Engine
from amor.judge.quantised import quantised_perplexity
from amor.models.amor import Amor
from amor.models.build import build
from amor.ops.product import FORMATS, native
from amor.ops.product.pages import use_huge_pages
from amor.presets import preset
from benchmarks import peer_models

PROMPT, NEW = 8, 16  # tokens read and written


def plain_mamba2(width: int, layers: int, vocab: int) -> Amor:
    """A Mamba2 without MLPs, fresh weights."""
    shape = {"width": width, "vocab": vocab, "d_ff": 0, "pattern": {"mamba2": layers}}
    return build(preset("mamba2", "180m", **shape)).eval()


@torch.no_grad()
def decode(table: BenchmarkTable, rounds: int, width: int, layers: int, vocab: int) -> BenchmarkRow:
    """One decode step in every weight format."""
    shape = {"batch": 1, "layers": layers, "width": width, "vocab": vocab}
    row = table.row("decode, Mamba2 without MLP", "product", **shape)
    model = plain_mamba2(width, layers, vocab)
    prompt, token = torch.randint(0, vocab, (1, PROMPT)), torch.tensor([1])
    engines = {kind: Engine(model, weights=kind) for kind in FORMATS}
    sides: dict[str, Callable[[], Any]] = {}
    for kind, engine in engines.items():
        sides[f"amor {kind}"] = partial(engine.resume(model(prompt).state).step, token)
    data = torch.ones(2**20 if table.quick else machine.READ_BYTES // 4)
    use_huge_pages([data])  # like the weights
    # bandwidth takes turns with the steps it is compared with: on a shared machine it varies
    sides["reading memory"] = partial(native.stream, data)
    peer = peer_models.mamba2(width, layers, vocab).eval()
    options = {"do_sample": False, "use_cache": True, "pad_token_id": 0}

    def generate(new: int) -> None:
        limits = {"max_new_tokens": new, "min_new_tokens": new}
        peer.generate(prompt, **limits, **options)  # type: ignore[operator]

    generating = {"one": partial(generate, 1), "many": partial(generate, NEW + 1)}
    times = alternate(sides | generating, 3 * rounds)
    one, many = times.pop("one"), times.pop("many")
    row.times |= times
    per_token = combined(lambda many, one: (many - one) / NEW, many, one)
    row.times |= {"transformers generate": per_token}
    read = data.nbytes / row.seconds["reading memory"] / 1e9
    row.numbers["read bandwidth, GB/s"] = read
    for kind, engine in engines.items():
        assert engine.compiled is not None
        weights = engine.compiled.nbytes + engine.head.matrix.nbytes
        nbytes = weights + model.start(1).nbytes
        row.numbers[f"tokens/s, {kind}"] = 1 / row.seconds[f"amor {kind}"]
        row.numbers[f"MB read per token, {kind}"] = nbytes / 1e6
        reading, decoding = row.times["reading memory"], row.times[f"amor {kind}"]
        row.add_ratio(f"share of bandwidth, {kind}", reading, decoding, nbytes / data.nbytes)
    tokens = torch.randint(0, vocab, (8, 17))
    for kind, value in quantised_perplexity(model, tokens, FORMATS).items():
        row.numbers[f"perplexity of random tokens, {kind}"] = value
    row.add_ratio(
        "over transformers", row.times["transformers generate"], row.times["amor float32"]
    )
    row.add_ratio("int8 over float32", row.times["amor float32"], row.times["amor int8"])
    return row


@torch.no_grad()
def prefill(
    table: BenchmarkTable, rounds: int, width: int, layers: int, vocab: int, length: int
) -> BenchmarkRow:
    """Reading a prompt, beside the model's projections alone."""
    shape = {"tokens": length, "layers": layers, "width": width}
    row = table.row("prefill, Mamba2 without MLP", "scan", "conv", **shape)
    model = plain_mamba2(width, layers, vocab)
    prompt, x = torch.randint(0, vocab, (1, length)), torch.randn(1, length, width)
    u = torch.randn(1, length, 2 * width)

    def products() -> None:
        for layer in model.backbone.layers:
            layer.mixer.in_proj(x)  # type: ignore[union-attr, operator]
            layer.mixer.out_proj(u)  # type: ignore[union-attr, operator]

    sides = {"amor": lambda: model(prompt, keep="last"), "own projections": products}
    row.times |= alternate(sides, rounds)
    row.numbers["tokens/s"] = length / row.seconds["amor"]
    row.numbers["tokens/s, projections alone"] = length / row.seconds["own projections"]
    ours, projections = row.times["amor"], row.times["own projections"]
    row.add_ratio("share of the projections' rate", projections, ours)
    return row
