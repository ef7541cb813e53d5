"""PIQA: which of two solutions reaches a goal, by log-likelihood."""

from typing import Literal

import msgspec

from amor.eval.rows import Text
from amor.eval.task_specs import HarnessTask, ScoreColumn


class PiqaRow(msgspec.Struct):
    """A goal, two solutions, and which is right."""

    goal: str
    sol1: Text
    sol2: Text
    label: Literal[0, 1]


TASKS = (
    HarnessTask(
        name="piqa",
        suite="common-sense",
        columns=(ScoreColumn("PIQA", "piqa", "acc", "piqa/acc"),),
        place=3,
        row=PiqaRow,
        file="piqa_validation",
        yaml="piqa/piqa.yaml",
    ),
)
