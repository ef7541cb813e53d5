"""The store of answers, one JSON line each, so that an evaluation that was killed resumes and
computes nothing twice.

The key of a line is the hash of the question, of model and tokenizer, and of the settings. The
harness's own cache is not used: its keys do not name the model, and it has no gate counts.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO, Literal

import msgspec

from amor import typed
from amor.files import disk_errors
from amor.records import Amount, Record
from amor.records.evals import Phases

log = logging.getLogger("amor")
ADVICE = "free some space and run the same command again: answers written so far are kept"
Kind = Literal["loglikelihood", "loglikelihood_rolling", "generate_until", "segment"]
# types of stored values; a segment is checked where it is used, which knows its type
VALUES: dict[Kind, Any] = {"loglikelihood": tuple[float, bool], "generate_until": str}


class Answer(Record, frozen=True):
    """One line of the store."""

    key: typed.Name  # of `key_of`
    kind: Kind  # of request
    # [log-likelihood, whether it is greedy]; a text; or a segment of a text
    value: Any
    gates: Phases = msgspec.field(default_factory=dict)  # how often blocks fired
    seconds: Amount = 0.0  # since the answer before it


def key_of(fingerprint: str, kind: Kind, question: Any) -> str:
    """The sha256 of everything an answer depends on."""
    text = json.dumps([fingerprint, kind, question], sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


class Store:
    """Answers by key, and the file that each is appended to.

    Args:
        path: the file; None keeps answers in memory only.
        more: files of other ranks, which are read but not written.
    """

    def __init__(self, path: Path | None, more: Iterable[Path] = ()):
        self.answers: dict[str, Answer] = {}  # by key
        self.path = path
        self.file: BinaryIO | None = None
        for each in (path, *more):
            if each is not None and each.exists():
                self._read(each)
        if path is None:
            return
        with disk_errors(path, ADVICE):
            path.parent.mkdir(parents=True, exist_ok=True)
            self.file = path.open("a+b")
            if self.file.seek(0, os.SEEK_END):
                self.file.seek(-1, os.SEEK_END)
                if self.file.read(1) != b"\n":  # a line that was torn must not swallow the next one
                    self.file.write(b"\n")

    def _read(self, path: Path) -> None:
        torn = 0
        for line in path.read_bytes().splitlines():
            try:
                answer = msgspec.json.decode(line, type=Answer)
                msgspec.convert(answer.value, VALUES.get(answer.kind, Any))
                self.answers[answer.key] = answer
            except (msgspec.DecodeError, UnicodeDecodeError):
                torn += bool(line.strip())
        if torn:
            lost = "cut off by a kill, or of an older version; those answers are computed again"
            log.warning("%s: %d line(s) cannot be read, %s", path, torn, lost)

    def add(self, answer: Answer) -> None:
        """Keep an answer, and append it to the file."""
        self.answers[answer.key] = answer
        if self.file is not None and self.path is not None:
            with disk_errors(self.path, ADVICE):
                self.file.write(msgspec.json.encode(answer) + b"\n")
                self.file.flush()

    def close(self) -> None:
        """Close the file."""
        if self.file is not None and self.path is not None:
            with disk_errors(self.path, ADVICE):
                self.file.close()
