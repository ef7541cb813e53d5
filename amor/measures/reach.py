"""What a run remembers of its task at other sizes: with fewer pairs than it has learned, or with
more."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from msgspec import Meta

from amor.measures.base import MeasureKind
from amor.measures.recall import RecallOptions, learned_task, right_answers
from amor.records import Label, Record
from amor.records.recall import Recall
from amor.study.cells import missing_notes, study_table
from amor.study.table import Table, TableRow

if TYPE_CHECKING:
    from amor.experiment.subject import FinishedRun
    from amor.study.results import Results
    from amor.train.recipe import Recipe


class ReachOptions(RecallOptions, frozen=True, kw_only=True):
    """The run's own task with these options changed, one table column each."""

    at: Annotated[tuple[dict[Label, Any], ...], Meta(min_length=1, max_length=64)]


class ReachResult(Record, frozen=True):
    """A task at several sizes, in the order of the options."""

    sizes: tuple[Recall, ...]


class ReachMeasure(MeasureKind):
    """Recall of the run's task at other sizes."""

    kind = "reach"
    Options, Result = ReachOptions, ReachResult

    @staticmethod
    def check(options: ReachOptions, recipe: Recipe) -> None:
        """Refuse sizes that the task cannot have."""
        from amor.data.tasks.base import read_task

        for changes in options.at if recipe.task else ():
            read_task({**recipe.task, **changes}, "judge.reach: task")

    @staticmethod
    def measure(subject: FinishedRun, options: ReachOptions) -> ReachResult:
        """Ask the questions of every size."""
        from amor.judge.recall import recall

        tasks = [learned_task(subject).change(**changes) for changes in options.at]
        asked: Any = {"rows": options.rows, "seed": options.seed}
        return ReachResult(sizes=tuple(recall(subject.model, task, **asked) for task in tasks))

    @staticmethod
    def table(results: Results) -> Table:
        """How much is remembered of the task at other sizes."""
        lines = []
        for row, each in results.by_row("reach").items():
            sizes = zip(*(one.sizes for one in each), strict=True)
            lines.append(TableRow(row, tuple(right_answers(size) for size in sizes)))
        at = results.options("reach").at
        columns = (", ".join(f"{key} {value}" for key, value in size.items()) for size in at)
        meaning = "right answers in percent, of runs that have learned the task at its own size"
        remarks = (meaning, *missing_notes(results))
        return study_table(results, "at other sizes", "model", columns, lines, *remarks)
