"""DROP in cloze form: a sentence to complete after the beginning of its passage."""

from amor.eval.cloze import ClozeRow, ClozeTask, question_prompt
from amor.eval.rows import HubSource
from amor.eval.task_specs import ScoreColumn

TASKS = (
    ClozeTask(
        name="cloze_drop",
        suite="retrieval",
        columns=(ScoreColumn("DROP cloze", "cloze_drop", "contains", "drop"),),
        place=9,
        row=ClozeRow,
        file="based_drop",
        hub=HubSource("hazyresearch/based_drop", None, "validation"),
        prompt=lambda text, row: question_prompt(text.strip(), row),
    ),
)
