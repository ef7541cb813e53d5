"""The retrieval suite: six sets of hazyresearch's Based, an answer to be found in a document.

SWDE, SQuAD and FDA are read with the harness's prompt and in cloze form (amor/eval/cloze.py);
TriviaQA, Natural Questions and DROP in cloze form alone.
"""

import re

import msgspec

from amor.eval.cloze import ClozeRow, ClozeTask, CompletionRow
from amor.eval.rows import HubSource, Substitute, Text, Texts
from amor.eval.task_specs import CompletionTask, ScoreColumn

SUMMARY = "Summary of information above..."  # where SWDE's own prompt begins
MARKS = re.compile(r"\[(?:PAR|DOC|TLE)\]")  # between the paragraphs of TriviaQA


class KeyedRow(CompletionRow):
    """A completion with the key of the value."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.key:
            raise ValueError("key is missing or empty")


class PageRow(KeyedRow):
    """A page of SWDE, whose window is cut from what stands before SWDE's own prompt."""

    @property
    def context(self) -> str:
        """The page before the prompt."""
        return self.text.partition(SUMMARY)[0]


class SquadAnswers(msgspec.Struct):
    """Answers that count."""

    text: Texts


class SquadRow(msgspec.Struct):
    """SQuAD 1.1 as it was published: a question, not a completion."""

    context: Text
    question: Text
    answers: SquadAnswers

    def as_completion(self) -> CompletionRow:
        """The question as a text whose continuation is the answer."""
        text = f"{self.context.strip()}\n\nQuestion: {self.question.strip()}\nAnswer:"
        return CompletionRow(text=text, value=self.answers.text[0])


def without(text: str, question: str) -> str:
    """A text without a question repeated at its end."""
    while text.lower().endswith(question.lower()):
        text = text[: -len(question)]
    return text


def key_prompt(text: str, row: CompletionRow, blank: str | None = None) -> str:
    """The window without the key at its end, then the key as the beginning of a sentence.

    blank: characters stripped from the window; None: all white space.
    """
    text = without(text, row.key + ":").strip(blank)
    return f"{text.strip('.')}. {row.key[0].upper()}{row.key[1:]}:"


def question_prompt(text: str, row: ClozeRow) -> str:
    """The window without the question at its end, then the question."""
    question = row.question.strip()
    return f"{without(text, question).strip().strip('.')}. {question}"


def nq_prompt(text: str, row: ClozeRow) -> str:
    """The same, where only a question in the same letters is taken away, and that once."""
    question = row.question.strip()
    return f"{text.strip().removesuffix(question).strip().strip('.')}. {question}"


PAGES = Substitute(
    "swde_completion", PageRow, "pages of SWDE, not the rows of hazyresearch/based-swde-v2"
)
QUESTIONS = Substitute(
    "squad_v1_dev_subset",
    SquadRow,
    "questions of SQuAD 1.1, not the completions of hazyresearch/based-squad",
    SquadRow.as_completion,
)
SUMMARIES = Substitute(
    "fda_completion", KeyedRow, "FDA summaries, not the rows of hazyresearch/based-fda"
)
TASKS = (
    CompletionTask(
        name="swde",
        columns=(ScoreColumn("SWDE", "swde", "contains", "swde"),),
        place=1,
        row=CompletionRow,
        file="based_swde",
        substitute=PAGES,
        class_path="swde.task.SWDE",
    ),
    CompletionTask(
        name="squad_completion",
        columns=(ScoreColumn("SQuAD", "squad_completion", "contains", "squad"),),
        place=2,
        row=CompletionRow,
        file="based_squad",
        substitute=QUESTIONS,
        class_path="squad_completion.task.SQUADCompletion",
    ),
    CompletionTask(
        name="fda",
        columns=(ScoreColumn("FDA", "fda", "contains", "fda"),),
        place=3,
        row=CompletionRow,
        file="based_fda",
        substitute=SUMMARIES,
        class_path="fda.task.FDA",
    ),
    ClozeTask(
        name="cloze_swde",
        columns=(ScoreColumn("SWDE cloze", "cloze_swde", "contains", "swde"),),
        place=4,
        row=PageRow,
        file="based_swde",
        substitute=PAGES,
        hub=HubSource("hazyresearch/based-swde-v2", "default", "validation"),
        prompt=key_prompt,
        sought=lambda row: [row.key, row.value],
    ),
    ClozeTask(
        name="cloze_squad",
        columns=(ScoreColumn("SQuAD cloze", "cloze_squad", "contains", "squad"),),
        place=5,
        row=CompletionRow,
        file="based_squad",
        substitute=QUESTIONS,
        hub=HubSource("hazyresearch/based-squad", "default", "validation"),
        prompt=lambda text, row: text.strip(),
        sought=lambda row: [row.value],
    ),
    ClozeTask(
        name="cloze_fda",
        columns=(ScoreColumn("FDA cloze", "cloze_fda", "contains", "fda"),),
        place=6,
        row=KeyedRow,
        file="based_fda",
        substitute=SUMMARIES,
        hub=HubSource("hazyresearch/based-fda", "default", "validation"),
        prompt=lambda text, row: key_prompt(text, row, "\n"),
        sought=lambda row: [row.key, row.value],
    ),
    ClozeTask(
        name="cloze_triviaqa",
        columns=(ScoreColumn("TQA cloze", "cloze_triviaqa", "contains", "triviaqa"),),
        place=7,
        row=ClozeRow,
        file="based_triviaqa",
        hub=HubSource("hazyresearch/based_triviaqa", None, "validation"),
        prompt=lambda text, row: question_prompt(MARKS.sub("", text.strip()), row),
    ),
    ClozeTask(
        name="cloze_nq",
        columns=(ScoreColumn("NQ cloze", "cloze_nq", "contains", "nq"),),
        place=8,
        row=ClozeRow,
        file="based_nq_2048",
        hub=HubSource("hazyresearch/based_nq_2048", None, "validation"),
        prompt=nq_prompt,
        sought=lambda row: row.answers[:1],
        length=2000,
    ),
    ClozeTask(
        name="cloze_drop",
        columns=(ScoreColumn("DROP cloze", "cloze_drop", "contains", "drop"),),
        place=9,
        row=ClozeRow,
        file="based_drop",
        hub=HubSource("hazyresearch/based_drop", None, "validation"),
        prompt=lambda text, row: question_prompt(text.strip(), row),
    ),
)
