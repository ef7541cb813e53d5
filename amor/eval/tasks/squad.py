"""SQuAD: the answer generated after a paragraph; the harness's prompt, and a cloze window."""

import msgspec

from amor.eval.cloze import ClozeTask, CompletionRow
from amor.eval.rows import HubSource, Substitute, Text, Texts
from amor.eval.task_specs import CompletionTask, ScoreColumn


class SquadAnswers(msgspec.Struct):
    """Answers that count."""

    text: Texts


class SquadRow(msgspec.Struct):
    """SQuAD 1.1 as it was published: a question, not a completion."""

    context: Text
    question: Text
    answers: SquadAnswers


def as_completion(row: SquadRow) -> CompletionRow:
    """A question as a text whose continuation is the answer."""
    text = f"{row.context.strip()}\n\nQuestion: {row.question.strip()}\nAnswer:"
    return CompletionRow(text=text, value=row.answers.text[0])


QUESTIONS = Substitute(
    "squad_v1_dev_subset",
    SquadRow,
    "questions of SQuAD 1.1, not the completions of hazyresearch/based-squad",
    as_completion,
)
TASKS = (
    CompletionTask(
        name="squad_completion",
        suite="retrieval",
        columns=(ScoreColumn("SQuAD", "squad_completion", "contains", "squad"),),
        place=2,
        row=CompletionRow,
        file="based_squad",
        substitute=QUESTIONS,
        class_path="squad_completion.task.SQUADCompletion",
    ),
    ClozeTask(
        name="cloze_squad",
        suite="retrieval",
        columns=(ScoreColumn("SQuAD cloze", "cloze_squad", "contains", "squad"),),
        place=5,
        row=CompletionRow,
        file="based_squad",
        substitute=QUESTIONS,
        hub=HubSource("hazyresearch/based-squad", "default", "validation"),
        prompt=lambda text, row: text.strip(),
        sought=lambda row: [row.value],
    ),
)
