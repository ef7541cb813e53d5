"""What a run that learned a generated task remembers of rows it never met
(amor/judge/recall.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated

from msgspec import Meta

from amor.checks import Seed
from amor.errors import AmorError
from amor.measures.base import MeasureKind
from amor.records import Record
from amor.records.recall import Recall
from amor.study.cells import chosen_on, mean_cell, missing_notes, pooled_cell, study_table
from amor.study.table import Cell, Table, TableRow

if TYPE_CHECKING:
    from amor.data.tasks.base import Task
    from amor.experiment.subject import FinishedRun
    from amor.study.results import Results


class RecallOptions(Record, frozen=True):
    """Rows of the run's own task, of the stream that no training reads."""

    rows: Annotated[int, Meta(ge=1, le=2**20)] = 256  # a standard error of 1 to 3 % of the answers
    seed: Seed = 0  # of the rows


class RecallMeasure(MeasureKind):
    """Recall of the run's own task."""

    kind = "recall"
    Options, Result = RecallOptions, Recall

    @staticmethod
    def measure(subject: FinishedRun, options: RecallOptions) -> Recall:
        """Ask the questions of rows that no training read."""
        from amor.judge.recall import recall

        return recall(subject.model, learned_task(subject), rows=options.rows, seed=options.seed)

    @staticmethod
    def table(results: Results) -> Table:
        """How much of a task is remembered, and where gates fired: at the questions, and
        elsewhere."""
        lines = [
            TableRow(row, tuple(make(each) for make in COLUMNS.values()))
            for row, each in results.by_row("recall").items()
        ]
        meaning = (
            "right: the best token at every token of an answer; state: numbers per row of a batch"
        )
        chosen = chosen_on(results, "the task's valid stream, reported on its test stream")
        remarks = (meaning, *chosen, *missing_notes(results))
        return study_table(results, "what is remembered", "model", COLUMNS, lines, *remarks)


def learned_task(subject: FinishedRun) -> Task:
    """The generated task that a run was trained on."""
    from amor.data.tasks.base import read_task

    if not subject.recipe.task:
        raise AmorError(
            f"{subject.run.folder} learned a text, not a task; judge.recall and judge.reach are "
            "for runs of a task"
        )
    return read_task(subject.recipe.task)


def right_answers(seeds: Sequence[Recall]) -> Cell | None:
    """Right answers in percent, over seeds."""
    means = [one.token for one in seeds if one.token.mean is not None]
    return pooled_cell([(100 * (m.mean or 0.0), 100 * (m.se or 0.0)) for m in means], 1)


# heading -> its cell, from the results of a row's seeds
COLUMNS: dict[str, Callable[[Sequence[Recall]], Cell | None]] = {
    "right, %": right_answers,
    "by chance": lambda seeds: mean_cell((100 * one.chance for one in seeds), 1),
    "fires on questions, %": lambda seeds: mean_cell(
        (100 * block.questions for one in seeds for block in one.blocks), 1
    ),
    "elsewhere, %": lambda seeds: mean_cell(
        (100 * block.elsewhere for one in seeds for block in one.blocks), 1
    ),
    "state": lambda seeds: Cell(seeds[0].state.fixed, digits=0),
    "state per token": lambda seeds: Cell(seeds[0].state.a_token, digits=0),
}
