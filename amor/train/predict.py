"""What a recipe will take before it is run: steps, tokens, parameters, memory of a rank, floating-point work and time."""

import os
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from amor.models.amor import Amor
from amor.models.build import build
from amor.train.freeze import described, freeze, trained
from amor.train.optim import describe, groups
from amor.train.recipe import Recipe
from amor.train.sample import EVERY

# share of the matrix-product ceiling a training step reaches; a guess that the first steps of a run correct
REACHED = 0.4
# of a forward without numbers, which still takes its time: beyond them memory is reckoned from shorter ones
MOST_TOKENS, MOST_LOGITS = 2**15, 2**32


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes a rank holds."""

    weights: int
    gradients: int
    optimiser: int
    activations: int
    total: int


@dataclass(frozen=True)
class Prediction:
    """What a run will take."""

    recipe: str
    model: str
    parameters: int
    groups: tuple[str, ...]  # of parameters, as the optimiser has them, in words
    steps: int
    tokens: int
    step_tokens: int
    memory: MemoryEstimate
    flops: float
    flops_per_second: float  # of the machine, at its best
    flops_source: str  # who says so
    reached: float  # share of them that is reckoned with
    seconds: float


def predict(recipe: Recipe, flops: float, source: str) -> Prediction:
    """Everything in numbers; bytes are of one rank of the world torchrun has set, or of one process."""
    model = build(recipe.config(), device="meta")
    freeze(model, recipe.freeze)
    parameters = sum(p.numel() for p in model.parameters())
    tokens = recipe.total_steps * recipe.step_tokens
    work = train_flops(model, recipe.context) * tokens
    return Prediction(
        recipe=recipe.name,
        model=model.config.name,
        parameters=parameters,
        groups=(*describe(groups(model, recipe.optimiser, recipe.lr)), *described(model)),
        steps=recipe.total_steps,
        tokens=tokens,
        step_tokens=recipe.step_tokens,
        memory=memory(model, parameters, recipe),
        flops=work,
        flops_per_second=flops,
        flops_source=source,
        reached=REACHED,
        seconds=work / (flops * REACHED),
    )


def train_flops(model: Amor, context: int) -> float:
    """FLOPs of matrix products a token of training: thrice the forward, a head pass for every gate that asks, and two on the
    sample of every gate that learns from gains."""
    forward = model.cost(context // 2, fire_rate=1.0, heads=1).flops  # attention sees half the context on average
    passes = sum(bool(block.gate.needs) + bool(block.gate.measures) * 2 / EVERY for block in model.each_block())
    # of a frozen backbone no gradient is formed: it is read once
    once = 0.0 if model.embed.weight.requires_grad else 2 * model.backbone.cost(context // 2).flops
    return 3 * forward - once + passes * 2 * model.head_weight.numel()


def memory(model: Amor, parameters: int, recipe: Recipe) -> MemoryEstimate:
    """Activations are counted on a model without numbers."""
    ranks = int(os.environ.get("WORLD_SIZE", "1")) if recipe.distributed == "fsdp" else 1
    held, learned = 4 * parameters // ranks, 4 * trained(model) // ranks
    kept = activations(model, recipe)
    return MemoryEstimate(
        weights=held, gradients=learned, optimiser=2 * learned, activations=kept, total=held + 3 * learned + kept
    )


def activations(model: Amor, recipe: Recipe) -> int:
    """Bytes kept from the forward for the backward pass of one micro-batch, as if in float32."""
    rows, context = min(recipe.micro_batch, recipe.batch), recipe.context
    most = max(1, min(MOST_TOKENS, MOST_LOGITS // model.config.vocab))
    if rows * context <= most:
        return kept_bytes(model, recipe, rows, context)
    shorter = min(context, most)
    return round(rows * context * kept_bytes(model, recipe, 1, shorter) / shorter)  # every token keeps as much


def kept_bytes(model: Amor, recipe: Recipe, rows: int, context: int) -> int:
    """Counted by running the model without numbers.

    With `recompute` every layer of the backbone keeps its input alone. When the backward pass comes to a layer, what the blocks,
    the norms and the loss kept is gone, and what the layer computes again is there: the larger of the two counts.
    """
    tokens = torch.zeros((rows, context), dtype=torch.long, device="meta")
    model.backbone.recompute = recipe.recompute
    whole = Kept(model)  # with `recompute`: all but the layers
    with whole, Fused():
        model(tokens, targets=tokens)
    if not recipe.recompute:
        return whole.bytes
    pattern = model.config.pattern
    inner = max(in_layer(model, pattern.index(kind), rows, context) for kind in set(pattern))
    return len(pattern) * 4 * tokens.numel() * model.config.width + max(whole.bytes, inner)


def in_layer(model: Amor, index: int, rows: int, columns: int) -> int:
    """Bytes kept inside one layer of the backbone, its input apart."""
    h = torch.empty(rows, columns, model.config.width, device="meta", requires_grad=True)
    state, kept = model.start(rows), Kept(model, h)
    with kept, Fused():
        model.backbone.layers[index](h, state.parts[index], state.layout(columns, None, None))
    return kept.bytes


class Fused(TorchFunctionMode):
    """Attention as a fused kernel keeps it: without a model's numbers torch takes the plain way, which keeps a weight a pair."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.scaled_dot_product_attention:
            return _Attend.apply(*args[:3])
        return func(*args, **(kwargs or {}))


class _Attend(torch.autograd.Function):
    """Of shapes alone: what is kept is queries, keys, values, the output, and one number a query."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        *above, heads, queries, _ = q.shape
        out = q.new_empty(*above, queries, heads, v.shape[-1]).transpose(
            -3, -2
        )  # so that heads lie beside each other, as kernels do
        ctx.save_for_backward(q, k, v, out, q.new_empty(q.shape[:-1]))
        return out


class Kept:
    """Counts the bytes autograd keeps while it is entered, each storage once; parameters and tensors that are given, not."""

    def __init__(self, model: Amor, *given: Tensor):
        self.known = {t.untyped_storage()._cdata for t in (*model.parameters(), *given)}
        self.bytes = 0
        self.held: list[Tensor] = []  # so that no storage is freed and its address counted as known
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self._keep, lambda t: t)

    def _keep(self, t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage._cdata not in self.known:
            self.known.add(storage._cdata)
            self.held.append(t)
            self.bytes += storage.nbytes()
        return t

    def __enter__(self) -> None:
        self.hooks.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.hooks.__exit__(*error)


def lines(found: Prediction) -> list[str]:
    """A prediction for people."""
    parts = ", ".join(f"{f.name} {getattr(found.memory, f.name) / 1e9:.2f}" for f in fields(MemoryEstimate) if f.name != "total")
    return [
        f"{found.recipe}: {found.model}",
        f"parameters  {found.parameters:,}",
        *(f"  {line}" for line in found.groups),
        f"steps       {found.steps:,} of {found.step_tokens:,} tokens: {found.tokens / 1e9:.3g} B tokens",
        f"memory      {found.memory.total / 1e9:.2f} GB a rank ({parts}; float32, activations of one micro-batch)",
        f"work        {found.flops:.3g} FLOPs",
        f"time        {spoken(found.seconds)} at {found.reached:.0%} of {found.flops_per_second:.3g} FLOP/s "
        f"({found.flops_source})",
    ]


def spoken(seconds: float) -> str:
    for size, unit in ((86400 * 365.25, "years"), (86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:,.1f} {unit}"
    return f"{seconds:.0f} seconds"
