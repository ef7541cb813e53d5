"""TriviaQA in cloze form: a sentence to complete after the beginning of its documents."""

import re

from amor.eval.cloze import ClozeForm, ClozeRow, with_question
from amor.eval.rows import HubSource
from amor.eval.task_specs import ClozeTask, ScoreColumn

MARKS = re.compile(r"\[(?:PAR|DOC|TLE)\]")  # between the paragraphs of the set

TASKS = (
    ClozeTask(
        name="cloze_triviaqa",
        suite="retrieval",
        metric="contains",
        columns=(ScoreColumn("TQA cloze", "cloze_triviaqa", "contains", "triviaqa"),),
        place=7,
        row=ClozeRow,
        file="based_triviaqa",
        hub=HubSource("hazyresearch/based_triviaqa", None, "validation"),
        form=ClozeForm(
            context=lambda row: row.context,
            sought=lambda row: [],
            prompt=lambda text, row: with_question(MARKS.sub("", text.strip()), row),
            answers=lambda row: row.answers,
        ),
    ),
)
