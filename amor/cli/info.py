"""What a model is made of: parameters by part, state at a context, FLOPs a token.

Nothing is allocated: the model is built from shapes alone, so 1.5b takes a second.

  amor info --model amor-mamba2 --scale 180m
  amor info runs/demo --context 16384 --fire-rate 0.22
"""

import argparse
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from torch import nn

from amor import typed
from amor.cli._model import model_arguments, model_config
from amor.config import Config
from amor.errors import AmorError


def arguments(parser: argparse.ArgumentParser) -> None:
    model_arguments(parser)
    parser.add_argument(
        "--context", type=int, metavar="N", help="tokens read so far, for state and FLOPs (default: the training length)"
    )
    parser.add_argument(
        "--fire-rate", type=float, default=0.4, metavar="SHARE", help="share of tokens each block fires on, 0 to 1 (default 0.4)"
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    config = model_config(args)
    context = config.context if args.context is None else args.context
    if context < 0:
        raise AmorError(f"--context {context} is negative; give the tokens read so far, e.g. 3072")
    if not 0 <= args.fire_rate <= 1:
        raise AmorError(f"--fire-rate {args.fire_rate} is not between 0 and 1")
    found = describe(config, context, args.fire_rate)
    draw(config, found)
    return dict(typed.tree(found))


@dataclass(frozen=True)
class Layer:
    layer: int
    mixer: str
    mixer_parameters: int
    mlp_parameters: int


@dataclass(frozen=True)
class Block:
    block: int
    parameters: int


@dataclass(frozen=True)
class Facts:
    """Of a model, and of its state and next token after a context."""

    model: str
    parameters: int
    parameters_millions: float
    parts: dict[str, int]  # parameters by part
    layers: tuple[Layer, ...]
    blocks: tuple[Block, ...]
    context: int
    fire_rate: float
    state_bytes: int
    state_fixed: int  # numbers of a row's state, however much was read
    state_a_token: int  # and for each token that was read
    flops_per_token: int
    weights_read_per_token: int
    state_read_per_token_bytes: int
    head_passes_per_token: float  # in decode, where blocks fire together


def describe(config: Config, context: int, fire_rate: float) -> Facts:
    from amor.models.build import build
    from amor.models.size import state_size

    size = state_size(config)
    model = build(config, device="meta")
    cost = model.cost(context, fire_rate)
    total = count(model)
    layers = tuple(
        Layer(i, kind, count(layer.mixer), count(layer.mlp))  # type: ignore[arg-type]
        for i, (kind, layer) in enumerate(zip(config.pattern, model.backbone.layers, strict=True))
    )
    embedding = "embedding" if model.head is not None else "embedding (tied with the head)"
    parts = {embedding: count(model.embed), "layers": count(model.backbone), "norm_f": count(model.norm_f)}
    if model.blocks:
        parts["blocks"] = count(model.blocks)
    parts |= {name: count(part) for name, part in (("final_norm", model.final_norm), ("head", model.head)) if part is not None}
    return Facts(
        model=config.name,
        parameters=total,
        parameters_millions=round(total / 1e6, 1),
        parts=parts,
        layers=layers,
        blocks=tuple(Block(k, count(block)) for k, block in enumerate(model.each_block())),
        context=context,
        fire_rate=fire_rate,
        state_bytes=int(cost.state_held),
        state_fixed=size.fixed,
        state_a_token=size.a_token,
        flops_per_token=int(cost.flops),
        weights_read_per_token=int(cost.weights),
        state_read_per_token_bytes=int(cost.state_read),
        head_passes_per_token=model.head_passes(fire_rate),
    )


def count(module: nn.Module | None) -> int:
    return 0 if module is None else sum(p.numel() for p in module.parameters())


def draw(config: Config, found: Facts) -> None:
    from rich.console import Console
    from rich.tree import Tree

    tree = Tree(f"[bold]{found.model}[/]  {found.parameters_millions:,} M parameters, width {config.width}")
    for name, size in found.parts.items():
        branch = tree.add(f"{name}  {amount(size)}")
        if name == "layers":
            for run_ in runs(found.layers):
                first, last = run_[0], run_[-1]
                where = f"{first.layer}" if len(run_) == 1 else f"{first.layer}-{last.layer}"
                branch.add(f"{where}: {first.mixer}  {amount(first.mixer_parameters)} + MLP {amount(first.mlp_parameters)} each")
        if name == "blocks":
            for block in found.blocks:
                extra = "" if config.blocks.first == "plain" or block.block else ", pre-normed by norm_f"
                mlp = ", with MLP" if config.blocks.mlp else ""
                branch.add(f"{block.block}: attention {behind(config, block.block)}{extra}{mlp}  {amount(block.parameters)}")
    held = f"{found.state_fixed:,} numbers, and {found.state_a_token:,} a token"
    tree.add(f"state at {found.context:,} tokens  {found.state_bytes / 1e6:,.1f} MB a row (float32): {held}")
    fired = f" at firing rate {found.fire_rate:g}" if config.blocks.count else ""
    read = f", head read {found.head_passes_per_token:g} times" if config.blocks.count else ""
    tree.add(f"one more token{fired}  {found.flops_per_token / 1e6:,.1f} MFLOP in matrix products{read}")
    Console(highlight=False).print(tree)


def behind(config: Config, block: int) -> str:
    """What decides where a block's attention runs."""
    if block and config.blocks.decide == "once":
        return "where block 0 fires"
    asked = " asked of the final norm" if config.blocks.probe == "final" else ""
    return f"behind gate '{config.blocks.gate}'{asked}"


def runs(layers: Iterable[Layer]) -> list[list[Layer]]:
    """Neighbouring layers of one mixer together."""
    return [list(each) for _, each in groupby(layers, key=lambda layer: layer.mixer)]


def amount(count: int) -> str:
    return f"{count / 1e6:,.1f} M" if count >= 1e5 else f"{count:,}"
