"""What a run will take, before it is started: steps, tokens, parameters, memory, FLOPs and time."""

from dataclasses import dataclass, fields

from amor.models.amor import Amor
from amor.models.build import build
from amor.train.freeze import described, freeze
from amor.train.memory import MemoryEstimate, estimate_memory
from amor.train.optim import describe, groups
from amor.train.recipe import Recipe
from amor.train.sample import EVERY

# Fraction of the matrix-product rate that a training step reaches. A guess: the measured 0.58 to
# 0.64 (docs/training.md) are of products alone; gates, norms and recurrences take time too.
REACHED = 0.4


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
        groups=(*describe(groups(model, recipe.optimiser, recipe.lr)), *described(model)),
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
    for size, unit in (
        (86400 * 365.25, "years"),
        (86400, "days"),
        (3600, "hours"),
        (60, "minutes"),
    ):
        if seconds >= 2 * size:
            return f"{seconds / size:,.1f} {unit}"
    return f"{seconds:.0f} seconds"
