"""A model that computes as a weight format says: every product by the format's definition, in plain torch."""

from __future__ import annotations

import copy
from functools import partial

import torch
from torch import Tensor

from amor.models.amor import Amor
from amor.ops.product import Matrix, pack
from amor.ops.product.reference import product
from amor.parts import Linear


@torch.no_grad()
def standing_for(model: Amor, weights: str) -> Amor:
    """What a decode engine with these weights stands for; the embedding is read exactly, the head is not."""
    other = copy.deepcopy(model)
    for layer in other.modules():
        if type(layer) is Linear and layer is not other.head:
            layer.forward = partial(_through, pack(layer.weight, weights))  # type: ignore[method-assign]
    other.logits = partial(_through, pack(model.head_weight, weights))  # type: ignore[method-assign]
    return other


def _through(matrix: Matrix, x: Tensor) -> Tensor:
    return product(x.flatten(0, -2), matrix).view(*x.shape[:-1], -1)
