"""What a run will take, before it is started: steps, tokens, parameters, memory, FLOPs and time.

Memory of one rank: weights, gradients and AdamW's two moments are exact, 4 bytes each per
parameter. Activations are a formula, checked against the measured peak of real steps
(tests/test_train_memory.py: within 25 %):

* Per token a module keeps for the backward pass, in float32 numbers: the input and output of every
  linear layer, the channels of every short convolution, the width of every norm, and the state of
  its recurrence once per chunk. An input that several layers read is counted for each of them,
  which stands for the temporaries of the backward pass.
* The loss keeps the gradient of the head's weights from the forward to the backward pass.
* With `recompute` a layer keeps its input alone. While the backward pass is in a layer, that
  layer's activations exist beside their gradients, half as much again; when it begins, the gated
  blocks' exist instead. The larger of the two counts.
* A frozen backbone keeps nothing; the temporaries of one layer at a time are half its activations.
"""

import os
from dataclasses import dataclass, fields

from torch import nn

from amor.models.amor import Amor
from amor.models.build import build
from amor.parts import RMSNorm, ShortConv
from amor.train.optim import describe, freeze, groups
from amor.train.recipe import Recipe
from amor.train.sample import EVERY

# Fraction of the matrix-product rate that a training step reaches. A guess: the measured 0.58 to
# 0.64 (docs/log.md) are of products alone; gates, norms and recurrences take time too.
REACHED = 0.4
BYTES = 4  # of a float32 number
CHUNK = 64  # tokens per kept state of a recurrence (amor/ops/chunks.py: 48 or 64 unless measured)
BACKWARD = 1.5  # activations and gradients inside one layer, over its activations


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes one rank needs."""

    weights: int
    gradients: int
    optimiser: int  # AdamW's two moments
    activations: int  # of one micro-batch at the peak, as if in float32
    total: int


@dataclass(frozen=True)
class Prediction:
    """What a run will take."""

    recipe: str
    model: str
    parameters: int
    groups: tuple[str, ...]  # one line of text per parameter group of the optimiser
    steps: int
    tokens: int
    step_tokens: int
    memory: MemoryEstimate
    flops: float  # of the whole run
    flops_per_second: float  # of all devices on a large matrix product
    flops_source: str  # where that number comes from, as text
    reached: float  # fraction of it that is assumed
    seconds: float


def predict(recipe: Recipe, flops: float, source: str) -> Prediction:
    """Predict a run from the shapes of its model; no weight is allocated.

    flops: FLOP/s of all devices. source: where that number comes from, as text.
    """
    model = build(recipe.config(), device="meta")
    freeze(model, recipe.freeze)
    tokens = recipe.total_steps * recipe.step_tokens
    work = train_flops(model, recipe.context) * tokens
    return Prediction(
        recipe=recipe.name,
        model=model.config.name,
        parameters=sum(p.numel() for p in model.parameters()),
        groups=tuple(describe(model, groups(model, recipe.optimiser, recipe.lr))),
        steps=recipe.total_steps,
        tokens=tokens,
        step_tokens=recipe.step_tokens,
        memory=estimate_memory(model, recipe),
        flops=work,
        flops_per_second=flops,
        flops_source=source,
        reached=REACHED,
        seconds=work / (flops * REACHED),
    )


def estimate_memory(model: Amor, recipe: Recipe) -> MemoryEstimate:
    """For one rank of the world torchrun has set, or for one process. The model may be on the meta
    device.
    """
    ranks = int(os.environ.get("WORLD_SIZE", "1")) if recipe.distributed == "fsdp" else 1
    weights = BYTES * sum(p.numel() for p in model.parameters()) // ranks
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    gradients = BYTES * trained // ranks
    kept = activations(model, recipe)
    return MemoryEstimate(
        weights=weights,
        gradients=gradients,
        optimiser=2 * gradients,
        activations=kept,
        total=weights + 3 * gradients + kept,
    )


def activations(model: Amor, recipe: Recipe) -> int:
    """Bytes of activations at the peak of one micro-batch, by the formula above."""
    tokens = min(recipe.micro_batch, recipe.batch) * recipe.context
    layers = [kept_per_token(layer) for layer in model.backbone.layers]
    blocks = sum(kept_per_token(block) for block in model.blocks)
    if not model.embed.weight.requires_grad:
        per_token = blocks + (BACKWARD - 1) * max(layers)
    elif recipe.recompute:
        inputs = len(layers) * model.config.width
        per_token = inputs + max(BACKWARD * max(layers), blocks)
    else:
        per_token = sum(layers) + blocks
    head = model.head_weight.numel() if model.head_weight.requires_grad else 0
    return BYTES * round(tokens * per_token + head)


def kept_per_token(module: nn.Module) -> float:
    """Numbers that a layer or a gated block keeps per token, by the formula above."""
    kept = 0.0
    for part in module.modules():
        if isinstance(part, nn.Linear):
            kept += part.in_features + part.out_features
        elif isinstance(part, ShortConv | RMSNorm):
            kept += len(part.weight)
    mixer = getattr(module, "mixer", None)
    # bytes of state after no token: of a recurrence all of it, of attention none
    return kept + (mixer.cost(0).state_held / BYTES / CHUNK if mixer is not None else 0.0)


def train_flops(model: Amor, context: int) -> float:
    """FLOPs of matrix products per trained token.

    Three times the forward, one head pass per gate that reads the head, and two more on the sample
    of every gate that learns from gains.
    """
    half = context // 2  # attention sees half the context on average
    forward = model.cost(half, fire_rate=1.0, heads=1).flops
    gates = [block.gate for block in model.each_block()]
    passes = sum(bool(gate.needs) + bool(gate.measures) * 2 / EVERY for gate in gates)
    # a frozen backbone has no backward pass
    frozen = not model.embed.weight.requires_grad
    saved = 2 * model.backbone.cost(half).flops if frozen else 0.0
    return 3 * forward - saved + passes * 2 * model.head_weight.numel()


def lines(prediction: Prediction) -> list[str]:
    """A prediction as lines of text."""
    memory = prediction.memory
    parts = [field.name for field in fields(MemoryEstimate) if field.name != "total"]
    sizes = ", ".join(f"{name} {getattr(memory, name) / 1e9:.2f}" for name in parts)
    tokens = f"{prediction.tokens / 1e9:.3g} B tokens"
    return [
        f"{prediction.recipe}: {prediction.model}",
        f"parameters  {prediction.parameters:,}",
        *(f"  {line}" for line in prediction.groups),
        f"steps       {prediction.steps:,} of {prediction.step_tokens:,} tokens: {tokens}",
        f"memory      {memory.total / 1e9:.2f} GB per rank ({sizes}; float32, "
        "activations of one micro-batch, by a formula)",
        f"work        {prediction.flops:.3g} FLOPs",
        f"time        {spoken(prediction.seconds)} at {prediction.reached:.0%} of "
        f"{prediction.flops_per_second:.3g} FLOP/s ({prediction.flops_source})",
    ]


def spoken(seconds: float) -> str:
    """A duration in the largest unit of which it is at least two."""
    units = {"years": 86400 * 365.25, "days": 86400, "hours": 3600, "minutes": 60}
    for unit, size in units.items():
        if seconds >= 2 * size:
            return f"{seconds / size:,.1f} {unit}"
    return f"{seconds:.0f} seconds"
