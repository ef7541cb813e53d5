"""The evaluation tasks: one file each (or one per family), found by being in this folder.

A file states TASKS, a tuple of specs (amor/eval/task_specs.py): the prompts, the type of a row, the
columns of tables. SUITES is the one place where suites are named. Tables read both without
importing torch or the harness.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from amor.errors import AmorError, nearest
from amor.eval import harness, niah
from amor.eval.rows import MissingDataError
from amor.eval.task_specs import LoadContext, ScoreColumn, Suite, TaskSpec
from amor.records.evals import Data

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# what tables read
__all__ = ["HELD_OUT", "LENGTHS", "SUITES", "ScoreColumn", "Suite", "in_suite", "suite"]
LONGEST = 1 << 24  # tokens of a generated prompt
MOST_SAMPLES = 1_000_000

LENGTHS, HELD_OUT = "length-extrapolation", "perplexity"  # the suites that the loop over text runs
SUITES = {
    "common-sense": Suite(
        table="common_sense",
        ablations=("ablation_440m", "ablation_common_sense_1p5b", "depth_k"),
        scale="180M",
        average=True,
    ),
    "retrieval": Suite(
        table="retrieval_niah",
        ablations=("ablation_retrieval_1p5b",),
        remark="it does not say which prompts it used, "
        "so its SWDE, SQuAD and FDA stand under whichever of ours are here",
    ),
    "niah": Suite(
        table="retrieval_niah",
        ablations=("ablation_retrieval_1p5b",),
        figure="niah",
        remark="its lengths are upper bounds, which the harness's generator reaches in steps",
    ),
    "longbench": Suite(table="longbench", average=True),
    HELD_OUT: Suite(
        table="common_sense",
        ablations=("ablation_common_sense_1p5b",),
        scale="180M",
        figure="",
        remark="of held-out FineWeb-Edu with the Llama 3.1 tokenizer; "
        "perplexities compare on the same text and tokens only",
        harness=False,
    ),
    LENGTHS: Suite(figure="extrapolation", harness=False),
}


@cache
def all_tasks() -> dict[str, TaskSpec]:
    """Every task by name, in the order of suites and of the paper's tables."""
    tasks: list[TaskSpec] = []
    for module in pkgutil.iter_modules(__path__):
        tasks += importlib.import_module(f"{__name__}.{module.name}").TASKS
    tasks.sort(key=lambda task: (list(SUITES).index(task.suite), task.place, task.name))
    by_name = {task.name: task for task in tasks}
    assert len(by_name) == len(tasks), "two tasks have the same name"
    return by_name


def in_suite(name: str) -> dict[str, TaskSpec]:
    """The tasks of a suite by name."""
    if name not in SUITES:
        raise AmorError(f"no suite {name!r}; {nearest(name, SUITES)}")
    return {task.name: task for task in all_tasks().values() if task.suite == name}


def suite(name: str) -> Suite:
    """A suite with the columns of its tasks."""
    tasks = in_suite(name)
    return replace(SUITES[name], columns=tuple(c for task in tasks.values() for c in task.columns))


@dataclass
class LoadedSuite:
    """The tasks of a suite as objects of the harness, where their rows come from, and why others
    are skipped."""

    tasks: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Data] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    # mean tokens of prompts, by task or "task,length"
    lengths: dict[str, float] = field(default_factory=dict)


def load(
    suite: str,
    data: Path | None,
    *,
    tokenizer: Tokenizer,
    lengths: Iterable[int] = niah.LENGTHS,
    seed: int = 0,
    samples: int = 500,
    names: Iterable[str] | None = None,
) -> LoadedSuite:
    """Load the tasks of a suite, or those named, from a folder of files (`data`) or from the hub
    (None).

    A task is loaded whole or skipped with a reason; a row that cannot be read is an error that
    names file and line.
    """
    tasks = in_suite(suite)
    wanted = list(tasks if names is None else dict.fromkeys(names))
    for name in wanted:
        if name not in tasks:
            raise AmorError(f"no task {name!r} in the suite {suite}; {nearest(name, tasks)}")
    harness.need("lm_eval", "datasets")
    if data is not None and not data.is_dir():
        lack = "not a folder" if data.exists() else "no such folder"
        raise AmorError(f"--data {data}: {lack}; give one that holds .jsonl files")
    lengths = tuple(dict.fromkeys(lengths))
    if not lengths or not all(1 <= length <= LONGEST for length in lengths):
        named = ", ".join(map(str, lengths)) or "none"
        raise AmorError(f"lengths {named}: at least one, each 1 to {LONGEST:,} tokens")
    if not 1 <= samples <= MOST_SAMPLES:
        raise AmorError(f"samples {samples}: 1 to {MOST_SAMPLES:,} per length")
    context, loaded = LoadContext(data, tokenizer, lengths, seed, samples), LoadedSuite()
    for name in wanted:
        try:
            loaded.tasks[name], loaded.data[name], prompts = tasks[name].load(context)
            loaded.lengths |= prompts
        except MissingDataError as error:
            loaded.skipped[name] = str(error)
    return loaded
