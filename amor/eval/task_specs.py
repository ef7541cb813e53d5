"""Kinds of evaluation tasks: what a file in amor/eval/tasks/ states, and how it becomes a task of
lm-evaluation-harness. Cloze tasks are in cloze.py, needles in niah.py.

A task is loaded whole, or a MissingDataError gives the reason why it is skipped. No module here
imports torch or the harness before a task is loaded, so that tables can read the columns of tasks.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec

from amor.data import hub
from amor.eval import harness, rows
from amor.eval.harness import Row
from amor.eval.rows import HubSource, MissingDataError, Rows, Substitute
from amor.records.evals import Data

if TYPE_CHECKING:
    from tokenizers import Tokenizer

LAST = 100  # place of a task that the paper does not have


@dataclass(frozen=True)
class ScoreColumn:
    """One column of a table of results: a metric of a task."""

    title: str  # in the head of the table
    task: str  # its name
    metric: str  # as the harness names it
    paper: str = ""  # the column of the paper's table; two of ours may correspond to one of theirs
    percent: bool = True  # an accuracy, shown times 100
    lower: bool = False  # whether less is better
    digits: int = 1
    # how it follows from the numbers of documents; "exp": exp(-mean) of log-likelihoods; None:
    # there are none
    over: Literal["mean", "exp", None] = "mean"

    @property
    def factor(self) -> float:
        """The factor between a score in a file and the number in a table."""
        return 100.0 if self.percent else 1.0


@dataclass(frozen=True)
class Suite:
    """Tasks that are evaluated together and shown in one table."""

    columns: tuple[ScoreColumn, ...] = ()  # those of its tasks, in the order of the paper's table
    table: str = ""  # of the paper
    ablations: tuple[str, ...] = ()  # tables of the paper with ablations
    scale: str = "1.5B"  # of the paper's rows that are shown by default
    average: bool = False  # whether the paper prints the mean of all accuracies
    figure: str = "accuracy"  # drawn by default; "": none
    remark: str = ""  # what a reader must know to compare our numbers with the paper's
    harness: bool = True  # run by lm-evaluation-harness; False: by the loop over text (run.py)


class LoadedTask(NamedTuple):
    """A task as an object of the harness, and where its rows come from."""

    task: Any
    data: Data
    # mean tokens of prompts by task or "task,length", where length is part of the task
    lengths: dict[str, float] = {}  # noqa: RUF012


@dataclass
class LoadContext:
    """What all tasks of a suite are loaded with."""

    data: Path | None  # folder of local files; None: the hub
    tokenizer: Tokenizer
    lengths: tuple[int, ...]  # of needle prompts, in tokens
    seed: int
    samples: int  # needle prompts per length
    hub_down: str = ""  # why the hub is out of reach, after the first task has tried it


@dataclass(frozen=True, kw_only=True)
class TaskSpec:
    """One evaluation task."""

    name: str  # on the command line and in results
    suite: str  # a key of tasks.SUITES
    columns: tuple[ScoreColumn, ...] = ()  # of tables
    place: int = LAST  # order within the suite: the paper's, then alphabetical

    def column_at(self, length: int) -> ScoreColumn | None:
        """The column of one length in tokens, for a task with one metric per length."""
        return None

    def load(self, context: LoadContext) -> LoadedTask:
        """The task of the harness; a MissingDataError where it must be skipped."""
        raise NotImplementedError(f"{self.name} is not run by the harness")


@dataclass(frozen=True, kw_only=True)
class RowTask(TaskSpec):
    """A task whose documents are rows of a local file or of a data set of the hub."""

    row: type  # msgspec.Struct with the fields of a row
    file: str  # NAME of the local NAME.jsonl
    substitute: Substitute | None = None

    def source(self) -> HubSource:
        """Its data set on the hub."""
        raise NotImplementedError

    def build(self, dataset: Rows, tokenizer: Tokenizer) -> LoadedTask:
        """The task of the harness, from checked rows."""
        raise NotImplementedError

    def load(self, context: LoadContext) -> LoadedTask:
        """The task with rows of a local file, or fetched from the hub."""
        dataset = self._local(context.data) if context.data is not None else self._fetched(context)
        return self.build(dataset, context.tokenizer)

    def _local(self, folder: Path) -> Rows:
        if (path := rows.find(folder, self.file)) is not None:
            return rows.read(path, self.row)
        other = self.substitute
        if other is not None and (path := rows.find(folder, other.file)) is not None:
            dataset, data = rows.read(path, other.row)
            data = msgspec.structs.replace(data, source=other.source(path))
            return Rows([other.convert(row) for row in dataset], data)
        places = f"{folder}, {folder / 'eval'} or {folder / 'long'}"
        lack = f"no {self.file}.jsonl or .jsonl.gz in {places}"
        raise MissingDataError(f"{lack}; {self._supply(folder)}")

    def _fetched(self, context: LoadContext) -> Rows:
        supply = f"{self._supply(Path('FOLDER'))} and give amor eval ... --data FOLDER"
        if context.hub_down:
            raise MissingDataError(f"not tried, since {context.hub_down}; {supply}")
        source = self.source()
        try:
            fetched = hub.dataset_rows(source.name, source.config, source.split)
        except hub.UnreachableError as error:
            context.hub_down = str(error) if error.down else ""
            raise MissingDataError(f"{error}; {supply}") from error
        where = f"hf:{source.name} ({source.config or 'default'}, {source.split})"
        return rows.check_rows(fetched, self.row, where)

    def _supply(self, folder: Path) -> str:
        return f"with a network: {self.source().command(folder / f'{self.file}.jsonl')}"


@dataclass(frozen=True, kw_only=True)
class HarnessTask(RowTask):
    """A task that the harness defines in a yaml file, unchanged but for the source of its rows."""

    yaml: str  # path below lm_eval/tasks

    def definition(self) -> Row:
        """The harness's definition."""
        return harness.definition(self.yaml)

    def source(self) -> HubSource:
        """The data set that the yaml names."""
        config = self.definition()
        split = config.get("test_split") or config["validation_split"]
        return HubSource(config["dataset_path"], config.get("dataset_name"), split)

    def build(self, dataset: Rows, tokenizer: Tokenizer) -> LoadedTask:
        """The harness's task on these rows."""
        docs, split = [self.harness_row(row) for row in dataset.rows], self.source().split
        task = harness.configured(self.definition(), docs, split, dataset.data.source)
        return LoadedTask(task, dataset.data)

    def harness_row(self, row: Any) -> Row:
        """A row as the harness's own data set has it."""
        return msgspec.to_builtins(row)


@dataclass(frozen=True, kw_only=True)
class CompletionTask(RowTask):
    """A task that the harness defines as a Python class; rows have `text` and `value`."""

    suite: str = "retrieval"
    class_path: str  # module.Class below lm_eval.tasks

    def source(self) -> HubSource:
        """The data set that the class names."""
        kind: Any = harness.class_of(self.class_path)
        return HubSource(kind.DATASET_PATH, kind.DATASET_NAME, "validation")

    def build(self, dataset: Rows, tokenizer: Tokenizer) -> LoadedTask:
        """The harness's task on these rows."""
        docs = [{"text": row.text, "value": row.value} for row in dataset.rows]
        kind, data = harness.class_of(self.class_path), dataset.data
        task = harness.completion(kind, self.name, docs, "validation", data.source)
        return LoadedTask(task, data)


@dataclass(frozen=True, kw_only=True)
class TextSet(TaskSpec):
    """Long documents that perplexity is measured on against length (amor/eval/lengths.py)."""

    hub: HubSource  # the data set
    substitute: Substitute | None = None  # its file is a path below --data
