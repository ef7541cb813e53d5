"""The reference for a weight format: a model that computes every product by its definition."""

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
def dequantised_reference(model: Amor, weights: str) -> Amor:
    """A copy of the model with the products of an engine with these weights; exact embeddings."""
    other = copy.deepcopy(model)
    for layer in other.modules():
        if type(layer) is Linear and layer is not other.head:
            layer.forward = partial(_multiply, pack(layer.weight, weights))  # type: ignore[method-assign]
    other.logits = partial(_multiply, pack(model.head_weight, weights))  # type: ignore[method-assign]
    return other


def _multiply(matrix: Matrix, x: Tensor) -> Tensor:
    return product(x.flatten(0, -2), matrix).view(*x.shape[:-1], -1)
