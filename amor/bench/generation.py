"""Decode and prefill of a Mamba2 without MLP, beside transformers' generate, memory bandwidth and its own products."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from amor.bench import machine, transformers
from amor.bench.table import Row, Table
from amor.bench.timing import alternate, combined
from amor.decode.engine import Engine
from amor.judge.quantised import quantised_perplexity
from amor.models.amor import Amor
from amor.models.build import build
from amor.ops.product import FORMATS, native
from amor.ops.product.pages import use_huge_pages
from amor.presets import preset

PROMPT, NEW = 8, 16


def plain_mamba2(width: int, layers: int, vocab: int) -> Amor:
    shape = {"width": width, "vocab": vocab, "d_ff": 0, "pattern": {"mamba2": layers}}
    return build(preset("mamba2", "180m", **shape)).eval()


@torch.no_grad()
def decode(table: Table, rounds: int, width: int, layers: int, vocab: int) -> Row:
    row = table.row("decode, Mamba2 without MLP", "product", batch=1, layers=layers, width=width, vocab=vocab)
    model = plain_mamba2(width, layers, vocab)
    prompt, token = torch.randint(0, vocab, (1, PROMPT)), torch.tensor([1])
    engines = {kind: Engine(model, weights=kind) for kind in FORMATS}
    sides: dict[str, Callable[[], Any]] = {}
    for kind, engine in engines.items():
        sides[f"amor {kind}"] = partial(engine.resume(model(prompt).state).step, token)
    data = torch.ones(machine.READ_BYTES // 4) if not table.quick else torch.ones(2**20)
    use_huge_pages([data])  # as the weights lie
    # bandwidth in turn with the steps it is compared with: on a shared machine it comes and goes
    sides["reading memory"] = partial(native.stream, data)
    peer = transformers.mamba2(width, layers, vocab).eval()
    options = {"do_sample": False, "use_cache": True, "pad_token_id": 0}

    def generate(new: int) -> None:
        peer.generate(prompt, max_new_tokens=new, min_new_tokens=new, **options)  # type: ignore[operator]

    taken = alternate(sides | {"one": partial(generate, 1), "many": partial(generate, NEW + 1)}, 3 * rounds)
    row.time({name: taken[name] for name in sides})
    row.time({"transformers generate": combined(lambda many, one: (many - one) / NEW, taken["many"], taken["one"])})
    read = data.nbytes / row.seconds["reading memory"] / 1e9
    row.found["read bandwidth, GB/s"] = read
    for kind, engine in engines.items():
        assert engine.compiled is not None
        nbytes = engine.compiled.nbytes + engine.head.matrix.nbytes + model.start(1).nbytes
        row.found[f"tokens/s, {kind}"] = 1 / row.seconds[f"amor {kind}"]
        row.found[f"MB read a token, {kind}"] = nbytes / 1e6
        bytes_read = nbytes / data.nbytes
        row.ratio(f"share of bandwidth, {kind}", row.times["reading memory"], row.times[f"amor {kind}"], bytes_read)
    for kind, value in quantised_perplexity(model, torch.randint(0, vocab, (8, 17)), FORMATS).items():
        row.found[f"perplexity of random tokens, {kind}"] = value
    row.ratio("over transformers", row.times["transformers generate"], row.times["amor float32"])
    row.ratio("int8 over float32", row.times["amor float32"], row.times["amor int8"])
    return row


@torch.no_grad()
def prefill(table: Table, rounds: int, width: int, layers: int, vocab: int, length: int) -> Row:
    row = table.row("prefill, Mamba2 without MLP", "scan", "conv", tokens=length, layers=layers, width=width)
    model = plain_mamba2(width, layers, vocab)
    prompt, x = torch.randint(0, vocab, (1, length)), torch.randn(1, length, width)
    u = torch.randn(1, length, 2 * width)

    def products() -> None:
        for layer in model.backbone.layers:
            layer.mixer.in_proj(x)  # type: ignore[union-attr, operator]
            layer.mixer.out_proj(u)  # type: ignore[union-attr, operator]

    row.time(alternate({"amor": lambda: model(prompt, keep="last"), "own projections": products}, rounds))
    row.found["tokens/s"] = length / row.seconds["amor"]
    row.found["tokens/s, projections alone"] = length / row.seconds["own projections"]
    row.ratio("share of the projections' rate", row.times["own projections"], row.times["amor"])
    return row
