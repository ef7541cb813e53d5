"""LongBench: 14 English tasks on long contexts, with one more score of the first generated line."""

from dataclasses import dataclass

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
    """A task of the harness with one more metric: the score of the first line that was generated,
    since a base model never stops."""

    def definition(self) -> Row:
        """The harness's definition with the metric score_first_line added."""
        harness.need("lm_eval", "jieba", "fuzzywuzzy", "rouge")
        config = super().definition()
        score = config["process_results"]

        def process_results(doc: Row, results: list[str]) -> dict[str, float]:
            first = results[0].strip("\n").split("\n")[0]
            return score(doc, results) | {"score_first_line": score(doc, [first])["score"]}

        metrics = [*config["metric_list"], harness.mean_metric("score_first_line")]
        return config | {"process_results": process_results, "metric_list": metrics}

    def harness_row(self, row: LongBenchRow) -> Row:
        """A row with its question under the name that the prompts use."""
        question = row.input if row.question is None else row.question
        doc = {"context": row.context, "question": question, "answers": row.answers}
        return doc | {"all_classes": row.all_classes}


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
        columns=(ScoreColumn(title, f"longbench_{name}", "score", name),),
        place=place,
        row=LongBenchRow,
        file=f"longbench_{name}",
        yaml=f"longbench/{name}.yaml",
    )
    for place, (name, title) in enumerate(TITLES.items())
)
