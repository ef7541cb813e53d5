"""What a model is made of: parameters by part, state at a context, FLOPs per token.

Nothing is allocated: the model is built from shapes alone, so 1.5b takes a second.

  amor info --model amor-mamba2 --scale 180m
  amor info runs/demo --context 16384 --fire-rate 0.22
"""

import argparse
from dataclasses import dataclass
from itertools import groupby

from rich.console import Console
from rich.tree import Tree
from torch import nn

from amor.cli import Parser
from amor.cli._model import config_arguments, model_config
from amor.config import Config
from amor.errors import AmorError
from amor.models.build import build
from amor.models.size import state_size


def arguments(parser: Parser) -> None:
    """The options of the verb."""
    config_arguments(parser)
    parser.number("--context", None, "tokens read so far (default: the training length)")
    parser.number("--fire-rate", 0.4, "share of tokens each block fires on, 0 to 1")


@dataclass(frozen=True)
class LayerSize:
    """Parameters of a layer of the backbone."""

    layer: int
    mixer: str
    mixer_parameters: int
    mlp_parameters: int


@dataclass(frozen=True)
class BlockSize:
    """Parameters of a gated block."""

    block: int
    parameters: int


@dataclass(frozen=True)
class ModelFacts:
    """Of a model, and of its state and next token after a context."""

    model: str
    parameters: int
    parameters_millions: float
    parts: dict[str, int]  # parameters by part
    layers: tuple[LayerSize, ...]
    blocks: tuple[BlockSize, ...]
    context: int
    fire_rate: float
    state_bytes: int
    state_fixed: int  # numbers of a row's state, however much was read
    state_a_token: int  # and for each token that was read
    flops_per_token: int
    weights_read_per_token: int
    state_read_per_token_bytes: int
    head_passes_per_token: float  # in decode, where blocks fire together


def run(args: argparse.Namespace) -> ModelFacts:
    """Describe one model."""
    config = model_config(args)
    context = config.context if args.context is None else args.context
    if context < 0:
        raise AmorError(f"--context {context} is negative; give the tokens read so far, e.g. 3072")
    if not 0 <= args.fire_rate <= 1:
        raise AmorError(f"--fire-rate {args.fire_rate} is not between 0 and 1")
    size = measure(config, context, args.fire_rate)
    draw(config, size)
    return size


def measure(config: Config, context: int, fire_rate: float) -> ModelFacts:
    """Count parameters, state and cost from shapes alone."""
    state = state_size(config)
    model = build(config, device="meta")
    cost = model.cost(context, fire_rate)
    embedding = "embedding" if model.head is not None else "embedding (tied with the head)"
    modules: dict[str, nn.Module | None] = {
        embedding: model.embed,
        "layers": model.backbone,
        "norm_f": model.norm_f,
        "blocks": model.blocks if len(model.blocks) else None,
        "final_norm": model.final_norm,
        "head": model.head,
    }
    return ModelFacts(
        model=config.name,
        parameters=count(model),
        parameters_millions=round(count(model) / 1e6, 1),
        parts={name: count(module) for name, module in modules.items() if module is not None},
        layers=tuple(
            LayerSize(i, kind, count(layer.mixer), count(layer.mlp))  # type: ignore[arg-type]
            for i, (kind, layer) in enumerate(zip(config.pattern, model.backbone.layers))
        ),
        blocks=tuple(BlockSize(k, count(block)) for k, block in enumerate(model.each_block())),
        context=context,
        fire_rate=fire_rate,
        state_bytes=int(cost.state_held),
        state_fixed=state.fixed,
        state_a_token=state.a_token,
        flops_per_token=int(cost.flops),
        weights_read_per_token=int(cost.weights),
        state_read_per_token_bytes=int(cost.state_read),
        head_passes_per_token=model.head_passes(fire_rate),
    )


def count(module: nn.Module | None) -> int:
    """Parameters of a module."""
    return 0 if module is None else sum(p.numel() for p in module.parameters())


def draw(config: Config, size: ModelFacts) -> None:
    """Print the parts as a tree."""
    total = f"{size.parameters_millions:,} M parameters"
    tree = Tree(f"[bold]{size.model}[/]  {total}, width {config.width}")
    for name, parameters in size.parts.items():
        branch = tree.add(f"{name}  {amount(parameters)}")
        if name == "layers":
            for mixer, group in groupby(size.layers, key=lambda layer: layer.mixer):
                first, *others = group
                where = f"{first.layer}-{others[-1].layer}" if others else f"{first.layer}"
                parts = f"{amount(first.mixer_parameters)} + MLP {amount(first.mlp_parameters)}"
                branch.add(f"{where}: {mixer}  {parts} each")
        if name == "blocks":
            for block in size.blocks:
                kind = block_kind(config, block.block)
                branch.add(f"{block.block}: attention {kind}  {amount(block.parameters)}")
    numbers = f"{size.state_fixed:,} numbers, and {size.state_a_token:,} per token"
    memory = f"{size.state_bytes / 1e6:,.1f} MB per row (float32)"
    tree.add(f"state at {size.context:,} tokens  {memory}: {numbers}")
    gated = bool(config.blocks.count)
    fired = f" at firing rate {size.fire_rate:g}" if gated else ""
    passes = f", head read {size.head_passes_per_token:g} times" if gated else ""
    flops = f"{size.flops_per_token / 1e6:,.1f} MFLOP in matrix products"
    tree.add(f"one more token{fired}  {flops}{passes}")
    Console(highlight=False).print(tree)


def block_kind(config: Config, block: int) -> str:
    """What decides where a block's attention runs, and what else it has."""
    blocks = config.blocks
    probe = " read from the final norm" if blocks.probe == "final" else ""
    follows = block and blocks.decide == "once"
    gate = "where block 0 fires" if follows else f"behind gate '{blocks.gate}'{probe}"
    prenorm = "" if blocks.first == "plain" or block else ", pre-normed by norm_f"
    return f"{gate}{prenorm}{', with MLP' if blocks.mlp else ''}"


def amount(count: int) -> str:
    """1234567 -> 1.2 M."""
    return f"{count / 1e6:,.1f} M" if count >= 1e5 else f"{count:,}"
