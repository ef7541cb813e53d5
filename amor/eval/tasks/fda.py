"""FDA: an attribute generated after a device report; the harness's prompt, and a cloze window."""

from amor.eval.cloze import ClozeTask, CompletionRow, KeyedRow, key_prompt, without
from amor.eval.rows import HubSource, Substitute
from amor.eval.task_specs import CompletionTask, ScoreColumn

SUMMARIES = Substitute(
    "fda_completion", KeyedRow, "FDA summaries, not the rows of hazyresearch/based-fda"
)


def prompt(text: str, row: CompletionRow) -> str:
    """The window, then the key as the beginning of a sentence."""
    return key_prompt(without(text, row.key + ":").strip("\n"), row.key)


TASKS = (
    CompletionTask(
        name="fda",
        suite="retrieval",
        columns=(ScoreColumn("FDA", "fda", "contains", "fda"),),
        place=3,
        row=CompletionRow,
        file="based_fda",
        substitute=SUMMARIES,
        class_path="fda.task.FDA",
    ),
    ClozeTask(
        name="cloze_fda",
        suite="retrieval",
        columns=(ScoreColumn("FDA cloze", "cloze_fda", "contains", "fda"),),
        place=6,
        row=KeyedRow,
        file="based_fda",
        substitute=SUMMARIES,
        hub=HubSource("hazyresearch/based-fda", "default", "validation"),
        prompt=prompt,
        sought=lambda row: [row.key, row.value],
    ),
)
