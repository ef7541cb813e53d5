"""How large a model is: parameters, FLOPs per token, and the bytes of its state."""

from __future__ import annotations

from typing import TYPE_CHECKING

from amor import typed
from amor.measures.base import MeasureKind, NoOptions
from amor.records import Amount, Record

if TYPE_CHECKING:
    from amor.experiment.subject import FinishedRun


class ModelSize(Record, frozen=True):
    """Of one more token at the context of training, all blocks firing, the head read once for each
    gate that needs it."""

    parameters: typed.Count
    flops: Amount
    state_bytes: Amount


class SizeMeasure(MeasureKind):
    """Parameters, FLOPs and bytes of state."""

    kind = "size"
    Result = ModelSize

    @staticmethod
    def measure(subject: FinishedRun, options: NoOptions) -> ModelSize:
        """Count them from the model's shapes."""
        model = subject.model
        cost = model.cost(subject.recipe.context)
        parameters = sum(p.numel() for p in model.parameters())
        return ModelSize(parameters=parameters, flops=cost.flops, state_bytes=cost.state_held)
