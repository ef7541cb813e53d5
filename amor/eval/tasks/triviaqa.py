"""TriviaQA in cloze form: a sentence to complete after the beginning of its documents."""

import re

from amor.eval.cloze import ClozeRow, ClozeTask, question_prompt
from amor.eval.rows import HubSource
from amor.eval.task_specs import ScoreColumn

MARKS = re.compile(r"\[(?:PAR|DOC|TLE)\]")  # between the paragraphs of the set

TASKS = (
    ClozeTask(
        name="cloze_triviaqa",
        suite="retrieval",
        columns=(ScoreColumn("TQA cloze", "cloze_triviaqa", "contains", "triviaqa"),),
        place=7,
        row=ClozeRow,
        file="based_triviaqa",
        hub=HubSource("hazyresearch/based_triviaqa", None, "validation"),
        prompt=lambda text, row: question_prompt(MARKS.sub("", text.strip()), row),
    ),
)
