"""An attached model beside its backbone: equal outputs, unchanged tensors, and its perplexity."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from amor import typed
from amor.data.loader import Windows
from amor.errors import AmorError
from amor.judge.evaluate import evaluate
from amor.judge.gates import force_all
from amor.judge.windows import BatchWindows
from amor.models.amor import Amor
from amor.models.gated import PassOptions
from amor.train.data import TrainingData
from amor.train.distributed import World, pick_device
from amor.train.recipe import Recipe
from amor.train.step import boundary


@torch.no_grad()
def same_output(backbone: Amor, model: Amor, windows: Windows, closed: bool) -> bool:
    """Whether the two models have equal outputs on four windows, to the bit.

    closed: the second one with every gate closed.
    """
    rows = windows[:4]
    gates = force_all(model, False) if closed else None
    a, b = backbone(rows.tokens), model(rows.tokens, options=PassOptions(gates=gates))
    return torch.equal(a.hidden, b.hidden) and torch.equal(backbone.head_weight, model.head_weight)


def moved(before: Mapping[str, Tensor], model: Amor) -> list[str]:
    """Names of the backbone's tensors that have changed, even by a bit."""
    now = model.state_dict()
    return [name for name, t in before.items() if not torch.equal(now[name], t)]


def judged(model: Amor, recipe: Recipe) -> dict[str, Any]:
    """Scores on the validation windows of a run of the recipe."""
    data = TrainingData.open(replace(recipe, verify=False), World(pick_device("cpu")))
    if data.valid is None:
        raise AmorError(
            f"{recipe.data} holds no valid/ split to judge by; prepare it with --valid, e.g. "
            "--valid 0.05"
        )
    text = BatchWindows(
        data.valid, 0, data.valid.batch, boundary(recipe.documents, data.end_of_text)
    )
    return dict(typed.tree(evaluate(model.eval(), text, recipe.micro_batch)))
