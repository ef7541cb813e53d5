"""ARC, easy and challenge: school questions of several choices, by log-likelihood."""

import msgspec

from amor.eval.rows import Choices, Text
from amor.eval.task_specs import HarnessTask, ScoreColumn


class ArcRow(msgspec.Struct):
    """A question, its choices, and the label of the right one."""

    question: Text
    choices: Choices
    answerKey: str  # noqa: N815

    def __post_init__(self) -> None:
        self.choices.check_answer(self.answerKey, self.answerKey)


TASKS = tuple(
    HarnessTask(
        name=f"arc_{level}",
        suite="common-sense",
        columns=(ScoreColumn(title, f"arc_{level}", "acc", f"arc_{level}/acc"),),
        place=place,
        row=ArcRow,
        file=f"arc_{level}_test",
        yaml=f"arc/arc_{level}.yaml",
    )
    for place, level, title in ((4, "easy", "ARC-E"), (5, "challenge", "ARC-C"))
)
