"""Natural Questions in cloze form: a sentence to complete after a window around the answer."""

from amor.eval.cloze import ClozeRow, ClozeTask
from amor.eval.rows import HubSource
from amor.eval.task_specs import ScoreColumn


def prompt(text: str, row: ClozeRow) -> str:
    """The window without the question at its end, then the question."""
    question = row.question.strip()
    return f"{text.strip().removesuffix(question).strip().strip('.')}. {question}"


TASKS = (
    ClozeTask(
        name="cloze_nq",
        suite="retrieval",
        columns=(ScoreColumn("NQ cloze", "cloze_nq", "contains", "nq"),),
        place=8,
        row=ClozeRow,
        file="based_nq_2048",
        hub=HubSource("hazyresearch/based_nq_2048", None, "validation"),
        prompt=prompt,
        sought=lambda row: row.answers[:1],
        length=2000,
    ),
)
