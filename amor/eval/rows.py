"""Rows of evaluation data: local .jsonl files found, read whole and checked field by field, before a harness sees them.

A type below says what one row of a data set must hold; what else a row holds is left out, so that all rows of a set are alike.
"""

from __future__ import annotations

import gzip
import hashlib
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

from amor import typed
from amor.errors import AmorError

PLACES = ("", "eval", "long")  # below the folder of data, in the order they are looked into
SUFFIXES = (".jsonl", ".jsonl.gz")
MOST_BYTES = 1 << 30  # of one file, unpacked: it is held in memory
Text = Annotated[str, Meta(min_length=1)]
Texts = Annotated[list[str], Meta(min_length=1)]


class Rows(NamedTuple):
    """What was read, row by row, and the sha256 of the unpacked bytes."""

    rows: list[Any]
    sha256: str


def find(folder: Path, name: str) -> Path | None:
    """NAME.jsonl or NAME.jsonl.gz in the folder, or in its eval/ or long/."""
    candidates = (folder / place / f"{name}{suffix}" for place in PLACES for suffix in SUFFIXES)
    return next((path for path in candidates if path.is_file()), None)


def read(path: Path, kind: type) -> Rows:
    """Every row of a file as its type, or one line that names the file, the line and the field."""
    held = _unpacked(path)
    lines = ((f"{path} line {number}", line) for number, line in enumerate(held.split(b"\n"), 1) if line.strip())
    found: list[Any] = [typed.convert(kind, typed.json_tree(line, where), where) for where, line in lines]
    if not found:
        raise AmorError(f"{path} holds no row; one JSON object a line is right")
    return Rows(found, hashlib.sha256(held).hexdigest())


def checked(rows: Iterable[Any], kind: type, where: str) -> Rows:
    """The same of rows that came from elsewhere; the sha256 is that of their JSON."""
    digest = hashlib.sha256()
    found: list[Any] = []
    for number, row in enumerate(rows, 1):
        found.append(typed.convert(kind, row, f"{where} row {number}"))
        digest.update(msgspec.json.encode(found[-1]) + b"\n")
    if not found:
        raise AmorError(f"{where} holds no row")
    return Rows(found, digest.hexdigest())


def _unpacked(path: Path) -> bytes:
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            held: bytes = file.read(MOST_BYTES + 1)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise AmorError(f"{path} is not a whole gzip file ({error}); copy it again") from error
    except OSError as error:
        raise AmorError(f"{path} cannot be read ({error.strerror or error})") from error
    if len(held) > MOST_BYTES:
        raise AmorError(f"{path}: larger than {MOST_BYTES >> 20} MB unpacked, which no set of this kind is")
    return held


class Lambada(msgspec.Struct):
    text: Text

    def __post_init__(self) -> None:
        if not all(self.text.rpartition(" ")[::2]):
            raise ValueError("text needs a last word behind a space")


class HellaSwag(msgspec.Struct):
    activity_label: str
    ctx_a: str
    ctx_b: str
    endings: Texts
    label: Annotated[str, Meta(pattern=r"^[0-9]$")]

    def __post_init__(self) -> None:
        if int(self.label) >= len(self.endings):
            raise ValueError(f"label {self.label} is beyond the {len(self.endings)} endings")


class Piqa(msgspec.Struct):
    goal: str
    sol1: Text
    sol2: Text
    label: Literal[0, 1]


class Choices(msgspec.Struct):
    text: Texts
    label: Texts

    def __post_init__(self) -> None:
        if len(self.text) != len(self.label):
            raise ValueError(f"{len(self.text)} texts but {len(self.label)} labels")


class Arc(msgspec.Struct):
    question: Text
    choices: Choices
    answerKey: str  # noqa: N815

    def __post_init__(self) -> None:
        if self.answerKey not in self.choices.label:
            raise ValueError(f"answerKey {self.answerKey!r} is none of the labels {', '.join(self.choices.label)}")


class OpenBook(msgspec.Struct):
    question_stem: Text
    choices: Choices
    answerKey: str  # noqa: N815

    def __post_init__(self) -> None:
        if self.answerKey.lstrip() not in self.choices.label:
            raise ValueError(f"answerKey {self.answerKey!r} is none of the labels {', '.join(self.choices.label)}")


class WinoGrande(msgspec.Struct):
    sentence: str
    option1: Text
    option2: Text
    answer: Literal["1", "2"]

    def __post_init__(self) -> None:
        if "_" not in self.sentence:
            raise ValueError("sentence has no _ for the option to stand in")


class Targets(msgspec.Struct):
    choices: Texts
    labels: list[Literal[0, 1]]

    def __post_init__(self) -> None:
        if len(self.choices) != len(self.labels) or 1 not in self.labels:
            raise ValueError(f"{len(self.choices)} choices need as many labels, one of them 1")


class TruthfulQA(msgspec.Struct):
    question: Text
    mc2_targets: Targets


class Completion(msgspec.Struct):
    """A document whose text ends where `value` would follow (SWDE, FDA: as "Key:")."""

    text: Text
    value: Text
    key: str = ""

    def __post_init__(self) -> None:
        if not self.value.strip():
            raise ValueError("value is white space")


class Keyed(Completion):
    """A completion whose `key` is asked for."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.key:
            raise ValueError("key is missing or empty")


class Cloze(msgspec.Struct):
    """A context, a question to be completed, and the answers that count."""

    context: str
    question: Text
    answers: Texts
    alt_answers: list[str] = []
    tok_pos: Annotated[int, Meta(ge=0)] | None = None

    def __post_init__(self) -> None:
        if not self.question.strip():
            raise ValueError("question is white space")


class Answers(msgspec.Struct):
    text: Texts


class Squad(msgspec.Struct):
    """SQuAD 1.1 as it was published: a question, not a completion."""

    context: Text
    question: Text
    answers: Answers


class LongBench(msgspec.Struct):
    """LongBench's own files call the question `input`, the hub's copy `question`."""

    context: Text
    answers: Texts
    question: str | None = None
    input: str | None = None
    all_classes: list[str] | None = None

    def __post_init__(self) -> None:
        if self.question is None and self.input is None:
            raise ValueError("neither question nor input is there")


class Essay(msgspec.Struct):
    text: Text
