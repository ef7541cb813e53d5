"""Memory that one rank needs to train a recipe, estimated from the shapes of the model.

Weights, gradients and AdamW's two moments are exact: 4 bytes each per parameter. Activations are a
formula, checked against the measured peak of real steps (tests/test_train_memory.py: within 25 %):

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
from dataclasses import dataclass

from torch import nn

from amor.models.amor import Amor
from amor.parts import RMSNorm, ShortConv
from amor.train.freeze import trained
from amor.train.recipe import Recipe

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


def estimate_memory(model: Amor, recipe: Recipe) -> MemoryEstimate:
    """For one rank of the world torchrun has set, or for one process. The model may be on the meta
    device.
    """
    ranks = int(os.environ.get("WORLD_SIZE", "1")) if recipe.distributed == "fsdp" else 1
    weights = BYTES * sum(p.numel() for p in model.parameters()) // ranks
    gradients = BYTES * trained(model) // ranks
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
