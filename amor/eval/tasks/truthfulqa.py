"""TruthfulQA (MC2): the probability of true answers among true and false ones."""

from typing import Literal

import msgspec

from amor.eval.rows import ScoredTexts, Text
from amor.eval.task_specs import HarnessTask, ScoreColumn


class TruthTargets(msgspec.Struct):
    """Answers, and which of them are true (1)."""

    choices: ScoredTexts
    labels: list[Literal[0, 1]]

    def __post_init__(self) -> None:
        if len(self.choices) != len(self.labels) or 1 not in self.labels:
            raise ValueError(f"{len(self.choices)} choices need as many labels, one of them 1")


class TruthfulRow(msgspec.Struct):
    """A question and its answers."""

    question: Text
    mc2_targets: TruthTargets


TASKS = (
    HarnessTask(
        name="truthfulqa_mc2",
        suite="common-sense",
        columns=(ScoreColumn("TQA", "truthfulqa_mc2", "acc", "truthfulqa_mc2/acc"),),
        place=8,
        row=TruthfulRow,
        file="truthfulqa_mc_validation",
        yaml="truthfulqa/truthfulqa_mc2.yaml",
    ),
)
