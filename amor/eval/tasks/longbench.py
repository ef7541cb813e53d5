"""LongBench: 14 English tasks on long contexts, with one more score of the first generated line."""

from dataclasses import dataclass
from typing import Any

import msgspec

from amor.eval import harness
from amor.eval.harness import Row
from amor.eval.rows import Text, Texts
from amor.eval.task_specs import HarnessTask, ScoreColumn


class LongBenchRow(msgspec.Struct):
    """A context, a question and its answers; LongBench's own files name the question `input`."""

    context: Text
    answers: Texts
    question: str | None = None
    input: str | None = None
    all_classes: list[str] | None = None

    def __post_init__(self) -> None:
        if self.question is None and self.input is None:
            raise ValueError("neither question nor input is there")


@dataclass(frozen=True, kw_only=True)
class LongBenchTask(HarnessTask):
    """A task of the harness with one more metric, score_first_line."""

    def definition(self) -> dict[str, Any]:
        harness.need("lm_eval", "jieba", "fuzzywuzzy", "rouge")
        return harness.with_first_line(super().definition())

    def harness_row(self, row: LongBenchRow) -> Row:
        question = row.input if row.question is None else row.question
        return {
            "context": row.context,
            "question": question,
            "answers": row.answers,
            "all_classes": row.all_classes,
        }


# name of the set -> column; in the order of the paper's table
TITLES = {
    "narrativeqa": "NQA",
    "qasper": "QQA",
    "multifieldqa_en": "MFQ",
    "hotpotqa": "HQA",
    "2wikimqa": "2WM",
    "musique": "Mus",
    "gov_report": "GvR",
    "qmsum": "QMS",
    "multi_news": "MNs",
    "trec": "TRC",
    "triviaqa": "TQA",
    "samsum": "SSM",
    "lcc": "LCC",
    "repobench-p": "RBP",
}
TASKS = tuple(
    LongBenchTask(
        name=f"longbench_{name}",
        suite="longbench",
        metric="score",
        columns=(ScoreColumn(title, f"longbench_{name}", "score", name),),
        place=place,
        row=LongBenchRow,
        file=f"longbench_{name}",
        yaml=f"longbench/{name}.yaml",
    )
    for place, (name, title) in enumerate(TITLES.items())
)
