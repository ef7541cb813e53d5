"""SWDE: an attribute generated after a web page; the harness's prompt, and a cloze window."""

from amor.eval.cloze import ClozeTask, CompletionRow, KeyedRow, key_prompt, without
from amor.eval.rows import HubSource, Substitute
from amor.eval.task_specs import CompletionTask, ScoreColumn

SUMMARY = "Summary of information above..."  # where SWDE's own prompt begins


class PageRow(KeyedRow):
    """A page, whose window is cut from what stands before SWDE's own prompt."""

    @property
    def context(self) -> str:
        """The page before the prompt."""
        return self.text.partition(SUMMARY)[0]


PAGES = Substitute(
    "swde_completion", PageRow, "pages of SWDE, not the rows of hazyresearch/based-swde-v2"
)


def prompt(text: str, row: CompletionRow) -> str:
    """The window, then the key as the beginning of a sentence."""
    return key_prompt(without(text, row.key + ":").strip(), row.key)


TASKS = (
    CompletionTask(
        name="swde",
        suite="retrieval",
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
        columns=(ScoreColumn("SWDE cloze", "cloze_swde", "contains", "swde"),),
        place=4,
        row=PageRow,
        file="based_swde",
        substitute=PAGES,
        hub=HubSource("hazyresearch/based-swde-v2", "default", "validation"),
        prompt=prompt,
        sought=lambda row: [row.key, row.value],
    ),
)
