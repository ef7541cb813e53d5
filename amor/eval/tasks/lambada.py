"""LAMBADA: the last word of a passage, by its log-likelihood (accuracy and perplexity)."""

import msgspec

from amor.eval.rows import Text
from amor.eval.task_specs import HarnessTask, ScoreColumn


class LambadaRow(msgspec.Struct):
    """A passage whose last word is predicted."""

    text: Text

    def __post_init__(self) -> None:
        if not all(self.text.rpartition(" ")[::2]):
            raise ValueError("text needs a last word behind a space")


NAME = "lambada_openai"
TASKS = (
    HarnessTask(
        name=NAME,
        suite="common-sense",
        columns=(
            ScoreColumn(
                "LAMB ppl",
                NAME,
                "perplexity",
                f"{NAME}/perplexity",
                percent=False,
                lower=True,
                over="exp",
            ),
            ScoreColumn("LAMB", NAME, "acc", f"{NAME}/acc"),
        ),
        place=1,
        row=LambadaRow,
        file="lambada_openai_test",
        yaml="lambada/lambada_openai.yaml",
    ),
)
