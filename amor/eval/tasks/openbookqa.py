"""OpenBookQA: which choice completes a sentence of elementary science, by log-likelihood."""

import msgspec

from amor.eval.rows import Choices, Text
from amor.eval.task_specs import HarnessTask, ScoreColumn


class OpenBookRow(msgspec.Struct):
    """The beginning of a sentence, its choices, and the label of the right one."""

    question_stem: Text
    choices: Choices
    answerKey: str  # noqa: N815

    def __post_init__(self) -> None:
        self.choices.check_answer(self.answerKey, self.answerKey.lstrip())


TASKS = (
    HarnessTask(
        name="openbookqa",
        suite="common-sense",
        columns=(ScoreColumn("OBQA", "openbookqa", "acc", "openbookqa/acc"),),
        place=7,
        row=OpenBookRow,
        file="openbookqa_test",
        yaml="openbookqa/openbookqa.yaml",
    ),
)
