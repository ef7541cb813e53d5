"""SWDE: an attribute of a web page, generated after the page; as the harness asks, and as a cloze
window."""

from amor.eval.cloze import ClozeForm, CompletionRow, KeyedRow, ask, without
from amor.eval.rows import HubSource, Substitute
from amor.eval.task_specs import ClozeTask, CompletionTask, ScoreColumn

SUMMARY = (
    "Summary of information above..."  # where SWDE's own prompt begins, which the cloze form drops
)
PAGES = Substitute(
    "swde_completion", KeyedRow, "pages of SWDE, not the rows of hazyresearch/based-swde-v2"
)


def prompt(text: str, row: CompletionRow) -> str:
    """The window, then the key as the beginning of a sentence."""
    return f"{without(text, row.key + ':').strip().strip('.')}. {ask(row.key)}"


TASKS = (
    CompletionTask(
        name="swde",
        suite="retrieval",
        metric="contains",
        columns=(ScoreColumn("SWDE", "swde", "contains", "swde"),),
        place=1,
        row=CompletionRow,
        file="based_swde",
        substitute=PAGES,
        class_path="swde.task.SWDE",
    ),
    ClozeTask(
        name="cloze_swde",
        suite="retrieval",
        metric="contains",
        columns=(ScoreColumn("SWDE cloze", "cloze_swde", "contains", "swde"),),
        place=4,
        row=KeyedRow,
        file="based_swde",
        substitute=PAGES,
        hub=HubSource("hazyresearch/based-swde-v2", "default", "validation"),
        form=ClozeForm(
            context=lambda row: row.text.partition(SUMMARY)[0],
            sought=lambda row: [row.key, row.value],
            prompt=prompt,
            answers=lambda row: [row.value],
        ),
    ),
)
