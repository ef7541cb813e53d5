"""Natural Questions in cloze form: a sentence to complete after a window around the answer."""

from amor.eval.cloze import ClozeForm, ClozeRow
from amor.eval.rows import HubSource
from amor.eval.task_specs import ClozeTask, ScoreColumn


def prompt(text: str, row: ClozeRow) -> str:
    """The window without the question at its end, then the question."""
    question = row.question.strip()
    return f"{text.strip().removesuffix(question).strip().strip('.')}. {question}"


TASKS = (
    ClozeTask(
        name="cloze_nq",
        suite="retrieval",
        metric="contains",
        columns=(ScoreColumn("NQ cloze", "cloze_nq", "contains", "nq"),),
        place=8,
        row=ClozeRow,
        file="based_nq_2048",
        hub=HubSource("hazyresearch/based_nq_2048", None, "validation"),
        form=ClozeForm(
            context=lambda row: row.context,
            sought=lambda row: row.answers[:1],
            prompt=prompt,
            answers=lambda row: row.answers,
            length=2000,
        ),
    ),
)
