"""DROP in cloze form: a sentence to complete after the beginning of its passage."""

from amor.eval.cloze import ClozeForm, ClozeRow, with_question
from amor.eval.rows import HubSource
from amor.eval.task_specs import ClozeTask, ScoreColumn

TASKS = (
    ClozeTask(
        name="cloze_drop",
        suite="retrieval",
        metric="contains",
        columns=(ScoreColumn("DROP cloze", "cloze_drop", "contains", "drop"),),
        place=9,
        row=ClozeRow,
        file="based_drop",
        hub=HubSource("hazyresearch/based_drop", None, "validation"),
        form=ClozeForm(
            context=lambda row: row.context,
            sought=lambda row: [],
            prompt=lambda text, row: with_question(text.strip(), row),
            answers=lambda row: row.answers,
        ),
    ),
)
