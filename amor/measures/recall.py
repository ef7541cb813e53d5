"""What a run that learned a generated task remembers of rows it never met
(amor/judge/recall.py)."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from msgspec import Meta

from amor.checks import Seed
from amor.errors import AmorError
from amor.measures.base import MeasureKind
from amor.records import Record
from amor.records.recall import Recall
from amor.study.cells import chosen_on, mean_cell, missing_notes, pooled_error
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
        lines = []
        for row in results.ledger.rows:
            each: list[Recall] = list(results.of(row, "recall").values())
            if not each:
                continue
            cells = (
                right_answers(each),
                mean_cell((100 * one.chance for one in each), 1),
                mean_cell((100 * block.questions for one in each for block in one.blocks), 1),
                mean_cell((100 * block.elsewhere for one in each for block in one.blocks), 1),
                Cell(each[0].state.fixed, digits=0),
                Cell(each[0].state.a_token, digits=0),
            )
            lines.append(TableRow(row, cells))
        columns = (
            "right, %",
            "by chance",
            "fires on questions, %",
            "elsewhere, %",
            "state",
            "state per token",
        )
        meaning = (
            "right: the best token at every token of an answer; state: numbers per row of a batch"
        )
        chosen = chosen_on(results, "the task's valid stream, reported on its test stream")
        title, remarks = (
            f"{results.study.title}: what is remembered",
            (meaning, *chosen, *missing_notes(results)),
        )
        return Table(title, "model", columns, tuple(lines), notes=remarks)


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
    right = [
        (100 * one.token.mean, 100 * (one.token.se or 0.0))
        for one in seeds
        if one.token.mean is not None
    ]
    return (
        Cell(statistics.mean(mean for mean, _ in right), pooled_error(right), 1) if right else None
    )
