"""Rows of evaluation data: where they come from, and reading them whole, checked field by field.

A row type is a msgspec.Struct that names the fields a task needs; other fields are dropped, so that
all rows of a set are alike.
"""

from __future__ import annotations

import gzip
import hashlib
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from amor import typed
from amor.errors import AmorError
from amor.records.evals import Data

PLACES = ("", "eval", "long")  # folders below --data, in the order they are searched
MOST_BYTES = 1 << 30  # of one file, unpacked: it is kept in memory
Text = Annotated[str, Meta(min_length=1)]  # a field that must not be empty
Texts = Annotated[list[str], Meta(min_length=1)]
# choices that are scored: the harness divides by their lengths and reads their first characters
ScoredTexts = Annotated[list[Annotated[str, Meta(pattern=r"\S")]], Meta(min_length=1)]


class MissingDataError(AmorError):
    """The data of a task is not there; the message names it and what would supply it."""


class Rows(NamedTuple):
    """The rows of a data set, and where they come from (with the sha256 of the unpacked bytes)."""

    rows: list[Any]
    data: Data


@dataclass(frozen=True)
class HubSource:
    """A data set of the Hugging Face hub."""

    name: str  # owner/name
    config: str | None = None  # of a data set of several
    split: str = "test"
    field: str = ""  # the column that is the text of a document; "": whole rows are used

    def command(self, path: Path | str) -> str:
        """The command that writes the data set as a local file, for a machine with a network."""
        arguments = ", ".join(map(repr, filter(None, (self.name, self.config))))
        rows = f"load_dataset({arguments}, split={self.split!r})"
        if self.field:
            rows += f".select_columns({self.field!r})"
        if self.field not in ("", "text"):
            rows += f".rename_column({self.field!r}, 'text')"
        script = f"from datasets import load_dataset; {rows}.to_json({str(path)!r})"
        return f'python -c "{script}"'


@dataclass(frozen=True)
class Substitute:
    """A local file that replaces a data set which is not there; results name both."""

    file: str  # NAME of the local NAME.jsonl
    row: type  # msgspec.Struct with the fields of its rows
    note: str  # in what it differs
    convert: Callable[[Any], Any] = lambda row: row  # its row -> a row of the data set

    def source(self, path: Path) -> str:
        """The file as results name it."""
        return f"{path} (a stand-in: {self.note})"


class Choices(msgspec.Struct):
    """Choices of a question: texts, and as many labels."""

    text: ScoredTexts
    label: Texts

    def __post_init__(self) -> None:
        if len(self.text) != len(self.label):
            raise ValueError(f"{len(self.text)} texts but {len(self.label)} labels")

    def check_answer(self, answer: str, label: str) -> None:
        """An error where no choice has the label; `answer` is the label as the row has it."""
        if label not in self.label:
            raise ValueError(f"answerKey {answer!r} is none of the labels {', '.join(self.label)}")


def find(folder: Path, name: str) -> Path | None:
    """NAME.jsonl or NAME.jsonl.gz in the folder, or in its eval/ or long/."""
    endings = (".jsonl", ".jsonl.gz")
    candidates = (folder / place / f"{name}{ending}" for place in PLACES for ending in endings)
    return next((path for path in candidates if path.is_file()), None)


def read(path: Path, kind: type) -> Rows:
    """Every row of a file as its type; an error names the file, the line and the field."""
    text = _unpacked(path)
    lines = [(n, line) for n, line in enumerate(text.split(b"\n"), 1) if line.strip()]
    rows: list[Any] = [typed.from_json(kind, line, f"{path} line {n}") for n, line in lines]
    if not rows:
        raise AmorError(f"{path} holds no row; one JSON object per line is right")
    digest = hashlib.sha256(text).hexdigest()
    return Rows(rows, Data(source=str(path), sha256=digest, rows=len(rows)))


def check_rows(rows: Iterable[Any], kind: type, source: str) -> Rows:
    """Rows of the hub, checked in the same way; the sha256 is that of their JSON."""
    numbered = enumerate(rows, 1)
    checked: list[Any] = [typed.convert(kind, row, f"{source} row {n}") for n, row in numbered]
    if not checked:
        raise AmorError(f"{source} holds no row")
    digest = hashlib.sha256(msgspec.json.Encoder().encode_lines(checked)).hexdigest()
    return Rows(checked, Data(source=source, sha256=digest, rows=len(checked)))


def _unpacked(path: Path) -> bytes:
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            text: bytes = file.read(MOST_BYTES + 1)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise AmorError(f"{path} is not a whole gzip file ({error}); copy it again") from error
    except OSError as error:
        raise AmorError(f"{path} cannot be read ({error.strerror or error})") from error
    if len(text) > MOST_BYTES:
        raise AmorError(f"{path}: larger than {MOST_BYTES >> 20} MB unpacked; no such set is")
    return text
