"""WinoGrande: which of two options fills a blank, by log-likelihood of what follows it."""

from typing import Literal

import msgspec

from amor.eval.rows import Text
from amor.eval.task_specs import HarnessTask, ScoreColumn


class WinoGrandeRow(msgspec.Struct):
    """A sentence with a blank (_), two options, and the number of the right one."""

    sentence: str
    option1: Text
    option2: Text
    answer: Literal["1", "2"]

    def __post_init__(self) -> None:
        if "_" not in self.sentence:
            raise ValueError("sentence has no _ for the option to stand in")


TASKS = (
    HarnessTask(
        name="winogrande",
        suite="common-sense",
        columns=(ScoreColumn("WinoG", "winogrande", "acc", "winogrande/acc"),),
        place=6,
        row=WinoGrandeRow,
        file="winogrande_xl_validation",
        yaml="winogrande/default.yaml",
    ),
)
