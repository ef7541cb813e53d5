"""Where text comes from: .txt, .jsonl (both also .gz) and .parquet files, folders of them, or a
Hugging Face dataset.

A source yields its documents in a fixed order and can begin at any of them, which is what resuming
needs.
"""

from __future__ import annotations

import codecs
import gzip
import importlib.util
import json
import os
import stat
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Literal, NamedTuple, cast

from amor.errors import AmorError

SUFFIXES = (".txt", ".txt.gz", ".jsonl", ".jsonl.gz", ".parquet")
BLOCK = 1 << 24
LONGEST = (
    1 << 30
)  # bytes of a document: one is held in memory whole, and a small .gz may unpack to anything


class Document(NamedTuple):
    """A text, and how many bytes of its source were read up to it (for the progress bar)."""

    text: str
    seen: int


@dataclass(frozen=True)
class Reading:
    """How a source is read. `separator` cuts .txt files into documents; without it a file is one
    document.
    """

    field: str = "text"
    errors: str = "strict"
    separator: str | None = None
    config: str | None = None
    split: str = "train"

    def __post_init__(self) -> None:
        if self.errors not in ("strict", "replace"):
            raise AmorError(f"errors {self.errors!r}; choices: strict, replace")
        if self.separator == "":
            raise AmorError(
                "the separator is empty; leave it out to take every .txt file as one document"
            )


@dataclass(frozen=True)
class Source:
    """One file or dataset. `bytes` is its size on disk, None where that is not known."""

    name: str
    reading: Reading
    bytes: int | None = None
    changed: int | None = (
        None  # modification time in ns, so that a source changed between two runs is noticed
    )

    def documents(self, skip: int = 0) -> Iterator[Document]:
        """The documents from number `skip` on."""
        if self.name.startswith("hf:"):
            from amor.data.hub import dataset_documents

            return dataset_documents(self.name.removeprefix("hf:"), self.reading, skip)
        path = Path(self.name)
        if path.name.endswith(".parquet"):
            return _parquet(path, self.reading, skip)
        read = _lines if ".jsonl" in path.suffixes else _texts
        return read(path, self.reading, skip)


def find_sources(inputs: list[str], reading: Reading) -> list[Source]:
    """The sources of a command line, folders opened, each found readable before the work begins."""
    found: list[Source] = []
    for name in inputs:
        if name.startswith("hf:"):
            found.append(Source(name, reading))
            continue
        path = Path(name)
        if _kind(path) == "folder":
            inside = sorted(
                p
                for p in path.rglob("*")
                if p.is_file() and p.name.endswith(SUFFIXES) and not p.name.startswith(".")
            )
            if not inside:
                raise AmorError(
                    f"{path} holds no file that can be read; suffixes: {', '.join(SUFFIXES)}"
                )
            found += [_file(p, reading) for p in inside]
        else:
            found.append(_file(path, reading))
    if not found:
        raise AmorError("no input; give files, folders or hf:NAME")
    repeated = [name for name, count in Counter(s.name for s in found).items() if count > 1]
    if repeated:
        raise AmorError(f"{min(repeated)} is given twice; give every input once")
    return found


def _kind(path: Path) -> Literal["file", "folder", "other"]:
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        raise AmorError(
            f"no file or folder {path}; a dataset of the Hugging Face hub is written hf:{path}"
        ) from None
    except (OSError, ValueError) as error:  # a name with a NUL is a ValueError
        raise AmorError(f"{str(path)!r} cannot be read ({error})") from None
    return "folder" if stat.S_ISDIR(mode) else "file" if stat.S_ISREG(mode) else "other"


def _file(path: Path, reading: Reading) -> Source:
    if _kind(path) != "file":  # a pipe cannot be read again from where a kill left it
        raise AmorError(f"{path} is no file; give files, folders or hf:NAME")
    if not path.name.endswith(SUFFIXES):
        raise AmorError(f"{path} cannot be read; suffixes: {', '.join(SUFFIXES)}")
    if os.fsencode(path).decode("utf-8", "replace") != str(path):
        raise AmorError(
            f"{str(path)!a}: the name is not UTF-8, so no manifest can hold it; rename the file"
        )
    if path.name.endswith(".parquet"):
        need("pyarrow", f"to read {path}")
    status = path.stat()
    return Source(str(path), reading, status.st_size, status.st_mtime_ns)


def need(package: str, why: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise AmorError(f"the package {package} is needed {why}: pip install 'amor[data]'")


@contextmanager
def _opened(path: Path) -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    """The bytes of a file, unpacked, and the raw file below them whose position tells how far we
    are.
    """
    try:
        with path.open("rb") as raw:
            if path.suffix != ".gz":
                yield raw, raw
                return
            with gzip.GzipFile(fileobj=raw) as unpacked:
                yield cast(IO[bytes], unpacked), raw
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise AmorError(f"{path} is not a whole gzip file ({error}); copy it again") from error
    except OSError as error:
        raise AmorError(f"{path} cannot be read ({error.strerror or error})") from error


def _decoded(held: bytes, reading: Reading, where: str) -> str:
    try:
        return held.decode("utf-8", reading.errors)
    except UnicodeDecodeError as error:
        raise AmorError(
            f"{where} is not UTF-8 at byte {error.start} ({error.reason}); mend it or use "
            "--errors replace"
        ) from error


def _texts(path: Path, reading: Reading, skip: int) -> Iterator[Document]:
    with _opened(path) as (file, raw):
        for number, (start, held) in enumerate(_parts(file, reading.separator, path)):
            if number >= skip:
                where = str(path) if start == 0 else f"{path} from byte {start} on"
                yield Document(_decoded(held, reading, where), raw.tell())


def _parts(file: IO[bytes], separator: str | None, path: Path) -> Iterator[tuple[int, bytes]]:
    """The bytes between separators, each with its offset; the separator itself belongs to no
    document.
    """
    if separator is None:
        yield 0, _bounded(file.read(LONGEST + 1), str(path)).removeprefix(codecs.BOM_UTF8)
        return
    mark, start, held = separator.encode(), 0, b""
    while block := file.read(BLOCK):
        *whole, held = (held + block).split(mark)
        for part in whole:
            yield start, part
            start += len(part) + len(mark)
        _bounded(held, f"{path} from byte {start} on")
    yield start, held


def _bounded(held: bytes, where: str) -> bytes:
    if len(held) > LONGEST:
        raise AmorError(
            f"{where}: a document of more than {LONGEST >> 20:,} MB; cut it, .txt files with "
            "--separator"
        )
    return held


def _lines(path: Path, reading: Reading, skip: int) -> Iterator[Document]:
    with _opened(path) as (file, raw):
        for number, (where, line) in enumerate(_filled(file, path)):
            if number >= skip:
                yield Document(_line_text(line, reading, where), raw.tell())


def rows(path: Path) -> Iterator[tuple[str, object]]:
    """Every line of a .jsonl file (also .gz) as plain values, each with its place, for what is to
    be said against it.
    """
    with _opened(path) as (file, _):
        for where, line in _filled(file, path):
            yield where, _line_tree(line, Reading(), where)


def _filled(file: IO[bytes], path: Path) -> Iterator[tuple[str, bytes]]:
    """The lines that hold something, each with its place."""
    for number, line in enumerate(iter(partial(file.readline, LONGEST + 1), b""), start=1):
        if _bounded(line, f"{path} line {number}").strip():
            yield f"{path} line {number}", line


def _line_tree(line: bytes, reading: Reading, where: str) -> object:
    try:
        return json.loads(_decoded(line.removeprefix(codecs.BOM_UTF8), reading, where))
    except json.JSONDecodeError as error:
        raise AmorError(f"{where} is not JSON ({error.msg} at column {error.colno})") from error
    except ValueError as error:
        if isinstance(error, AmorError):
            raise
        raise AmorError(
            f"{where} is not JSON that can be read ({error})"
        ) from error  # a number of thousands of digits
    except RecursionError:
        raise AmorError(f"{where}: nested too deeply") from None


def _line_text(line: bytes, reading: Reading, where: str) -> str:
    held = _line_tree(line, reading, where)
    if not isinstance(held, dict) or reading.field not in held:
        has = (
            ", ".join(map(repr, list(held)[:20])) or "none"
            if isinstance(held, dict)
            else f"a {type(held).__name__}"
        )
        raise AmorError(
            f"{where} has no field {reading.field!r}, it has {has}; choose one with --field"
        )
    return text_of(held[reading.field], reading, where)


def text_of(value: object, reading: Reading, where: str) -> str:
    """A field's value, which must be a text that UTF-8 can hold."""
    if not isinstance(value, str):
        raise AmorError(
            f"{where}: field {reading.field!r} is a {type(value).__name__}, not a text; choose "
            "another with --field"
        )
    try:
        return value.encode("utf-8", reading.errors).decode("utf-8")
    except UnicodeEncodeError as error:  # half of a surrogate pair, written as an escape
        raise AmorError(
            f"{where} holds a broken character at {error.start}; mend it or use --errors replace"
        ) from error


def _parquet(path: Path, reading: Reading, skip: int) -> Iterator[Document]:
    import pyarrow
    from pyarrow import parquet

    try:
        file = parquet.ParquetFile(path)
        if reading.field not in file.schema_arrow.names:
            names = ", ".join(file.schema_arrow.names)
            raise AmorError(
                f"{path} has no column {reading.field!r}, it has {names}; choose one with --field"
            )
        size, total, first = path.stat().st_size, max(file.metadata.num_rows, 1), 0
        for group in range(file.num_row_groups):
            rows = file.metadata.row_group(group).num_rows
            if first + rows > skip:
                values = (
                    v
                    for batch in file.iter_batches(
                        1024, row_groups=[group], columns=[reading.field]
                    )
                    for v in batch[0]
                )
                for row, value in enumerate(values, start=first):
                    if row >= skip:
                        yield Document(
                            text_of(value.as_py(), reading, f"{path} row {row}"),
                            size * (row + 1) // total,
                        )
            first += rows
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        words = " ".join(str(error).split())
        raise AmorError(
            f"{path} is not a whole parquet file of text ({words}); copy it again"
        ) from error
