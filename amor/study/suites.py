"""Which columns of a suite a table shows. Suites and their columns are those of the tasks in
amor/eval/tasks."""

from collections.abc import Callable, Iterable

from amor.eval.tasks import LENGTHS, SUITES, ScoreColumn, Suite, in_suite, suite

__all__ = ["LENGTHS", "SUITES", "ScoreColumn", "Suite", "in_suite", "shown", "suite"]


def shown(
    columns: Iterable[ScoreColumn], measured: Callable[[ScoreColumn], bool]
) -> tuple[ScoreColumn, ...]:
    """Those that were measured; of the paper's columns that none of ours stands beside, the first
    of ours that would."""
    columns = tuple(columns)
    taken = {column.paper for column in columns if measured(column)}
    kept = []
    for column in columns:
        if measured(column) or (column.paper and column.paper not in taken):
            kept.append(column)
            taken.add(column.paper)
    return tuple(kept)
