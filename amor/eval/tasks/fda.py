"""FDA: an attribute of a device report, generated after the report; as the harness asks, and as a
cloze window."""

from amor.eval.cloze import ClozeForm, CompletionRow, KeyedRow, ask, without
from amor.eval.rows import HubSource, Substitute
from amor.eval.task_specs import ClozeTask, CompletionTask, ScoreColumn

SUMMARIES = Substitute(
    "fda_completion", KeyedRow, "FDA summaries, not the rows of hazyresearch/based-fda"
)


def prompt(text: str, row: CompletionRow) -> str:
    """The window, then the key as the beginning of a sentence."""
    bare = without(text, row.key + ":").strip("\n").strip(".")
    return f"{bare}. {ask(row.key)}"


TASKS = (
    CompletionTask(
        name="fda",
        suite="retrieval",
        metric="contains",
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
        metric="contains",
        columns=(ScoreColumn("FDA cloze", "cloze_fda", "contains", "fda"),),
        place=6,
        row=KeyedRow,
        file="based_fda",
        substitute=SUMMARIES,
        hub=HubSource("hazyresearch/based-fda", "default", "validation"),
        form=ClozeForm(
            context=lambda row: row.text,
            sought=lambda row: [row.key, row.value],
            prompt=prompt,
            answers=lambda row: [row.value],
        ),
    ),
)
