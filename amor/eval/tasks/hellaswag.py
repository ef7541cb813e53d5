"""HellaSwag: which of four endings follows, by log-likelihood."""

import re
from typing import Annotated

import msgspec
from msgspec import Meta

from amor.eval.rows import ScoredTexts
from amor.eval.task_specs import HarnessTask, ScoreColumn


class HellaSwagRow(msgspec.Struct):
    """A context in two parts, the endings, and the number of the right one."""

    activity_label: str
    ctx_a: str
    ctx_b: str
    endings: ScoredTexts
    label: Annotated[str, Meta(pattern=r"^[0-9]$")]

    def __post_init__(self) -> None:
        if int(self.label) >= len(self.endings):
            raise ValueError(f"label {self.label} is beyond the {len(self.endings)} endings")
        for number, ending in enumerate(self.endings):
            if not re.sub(r"\[.*?\]", "", ending).strip():  # what the harness leaves of it
                raise ValueError(f"endings[{number}], {ending!r}, has no text to be scored")


TASKS = (
    HarnessTask(
        name="hellaswag",
        suite="common-sense",
        columns=(ScoreColumn("HSwag", "hellaswag", "acc", "hellaswag/acc"),),
        place=2,
        row=HellaSwagRow,
        file="hellaswag_validation",
        yaml="hellaswag/hellaswag.yaml",
    ),
)
