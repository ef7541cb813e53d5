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
from itertools import islice
from pathlib import Path
from typing import IO, Literal, NamedTuple, cast

from amor.data.tokenizer import check_text
from amor.errors import AmorError, install_hint

SUFFIXES = (".txt", ".txt.gz", ".jsonl", ".jsonl.gz", ".parquet")
BLOCK = 1 << 24  # bytes read at a time
# bytes of a document: one is in memory whole, and a small .gz may unpack to anything
LONGEST = 1 << 30


class Document(NamedTuple):
    """A text, and the bytes of its source up to its end (for the progress bar)."""

    text: str
    bytes_read: int


@dataclass(frozen=True)
class Reading:
    """How a source is read.

    field: key or column of .jsonl, .parquet and datasets whose value is the text.
    errors: text that is not UTF-8: "strict" (default, so that damage is noticed) refuses it,
        "replace" writes U+FFFD.
    separator: cuts .txt files into documents. Default: a file is one document.
    config, split: of a dataset of the Hugging Face hub.
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
        check_text(self.separator or "", "the separator")


@dataclass(frozen=True)
class DocumentSource:
    """One file or dataset. `bytes` is its size on disk, None where that is not known."""

    name: str
    reading: Reading
    bytes: int | None = None
    changed: int | None = None  # modification time in ns, to notice a change between two runs

    @property
    def one_document(self) -> bool:
        """Whether it is a text file, which is one document where no separator cuts it."""
        return self.name.endswith((".txt", ".txt.gz"))

    def documents(self, skip: int = 0) -> Iterator[Document]:
        """The documents from number `skip` on."""
        if self.name.startswith("hf:"):
            from amor.data.hub import dataset_documents

            return dataset_documents(self.name.removeprefix("hf:"), self.reading, skip)
        path = Path(self.name)
        if path.name.endswith(".parquet"):
            return _parquet(path, self.reading, skip)
        return _documents(path, self.reading, skip)


def find_sources(inputs: list[str], reading: Reading) -> list[DocumentSource]:
    """The sources of a command line: files, the files of folders, datasets; each must exist."""
    sources: list[DocumentSource] = []
    for name in inputs:
        path = Path(name)
        if name.startswith("hf:"):
            sources.append(DocumentSource(name, reading))
        elif _kind(path) != "folder":
            sources.append(_file(path, reading))
        else:
            files = (p for p in path.rglob("*") if p.name.endswith(SUFFIXES) and p.is_file())
            inside = sorted(p for p in files if not p.name.startswith("."))
            if not inside:
                suffixes = ", ".join(SUFFIXES)
                raise AmorError(f"{path} holds no file that can be read; suffixes: {suffixes}")
            sources += [_file(p, reading) for p in inside]
    if not sources:
        raise AmorError("no input; give files, folders or hf:NAME")
    repeated = [name for name, count in Counter(s.name for s in sources).items() if count > 1]
    if repeated:
        raise AmorError(f"{min(repeated)} is given twice; give every input once")
    return sources


def left_out(inputs: list[str]) -> Counter[str]:
    """Files of the folders among the inputs that `find_sources` leaves out: suffix -> count."""
    folders = (Path(name) for name in inputs if not name.startswith("hf:"))
    files = (p for folder in folders if folder.is_dir() for p in folder.rglob("*") if p.is_file())
    others = (p for p in files if p.name.startswith(".") or not p.name.endswith(SUFFIXES))
    return Counter(p.suffix or p.name for p in others)


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


def _file(path: Path, reading: Reading) -> DocumentSource:
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
    return DocumentSource(str(path), reading, status.st_size, status.st_mtime_ns)


def need(package: str, why: str) -> None:
    """Refuse to go on without an optional package."""
    if importlib.util.find_spec(package) is None:
        raise AmorError(f"the package {package} is needed {why}: {install_hint('data')}")


@contextmanager
def _opened(path: Path) -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    """A file as unpacked bytes, and the raw file below, whose position is the progress."""
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


def _decoded(data: bytes, reading: Reading, where: str) -> str:
    try:
        return data.decode("utf-8", reading.errors)
    except UnicodeDecodeError as error:
        raise AmorError(
            f"{where} is not UTF-8 at byte {error.start} ({error.reason}); mend it or use "
            "--errors replace"
        ) from error


def _documents(path: Path, reading: Reading, skip: int) -> Iterator[Document]:
    """The documents of a .jsonl or .txt file: its lines, or what separators cut it into."""
    lines = ".jsonl" in path.suffixes
    text = _line_text if lines else _decoded
    with _opened(path) as (file, raw):
        parts = _filled(file, path) if lines else _parts(file, reading.separator, path)
        for where, data in islice(parts, skip, None):
            yield Document(text(data, reading, where), raw.tell())


def _parts(file: IO[bytes], separator: str | None, path: Path) -> Iterator[tuple[str, bytes]]:
    """The bytes between separators, each with its place."""
    where = str(path)
    if separator is None:
        yield where, _bounded(file.read(LONGEST + 1), where).removeprefix(codecs.BOM_UTF8)
        return
    mark, start, rest = separator.encode(), 0, b""
    while block := file.read(BLOCK):
        *whole, rest = (rest + block).split(mark)
        for part in whole:
            yield where, part
            start += len(part) + len(mark)
            where = f"{path} from byte {start} on"
        _bounded(rest, f"{path} from byte {start} on")
    yield where, rest


def _bounded(data: bytes, where: str) -> bytes:
    if len(data) > LONGEST:
        raise AmorError(
            f"{where}: a document of more than {LONGEST >> 20:,} MB; cut it, .txt files with "
            "--separator"
        )
    return data


def rows(path: Path) -> Iterator[tuple[str, object]]:
    """Every line of a .jsonl file (also .gz) as plain values, each with its place for errors."""
    with _opened(path) as (file, _):
        for where, line in _filled(file, path):
            yield where, _line_tree(line, Reading(), where)


def _filled(file: IO[bytes], path: Path) -> Iterator[tuple[str, bytes]]:
    """The lines that are not blank, each with its place."""
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
        # a number of thousands of digits
        raise AmorError(f"{where} is not JSON that can be read ({error})") from error
    except RecursionError:
        raise AmorError(f"{where}: nested too deeply") from None


def _line_text(line: bytes, reading: Reading, where: str) -> str:
    tree = _line_tree(line, reading, where)
    if not isinstance(tree, dict) or reading.field not in tree:
        has = f"a {type(tree).__name__}"
        if isinstance(tree, dict):
            has = ", ".join(map(repr, list(tree)[:20])) or "none"
        raise AmorError(
            f"{where} has no field {reading.field!r}, it has {has}; choose one with --field"
        )
    return text_of(tree[reading.field], reading, where)


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
                batches = file.iter_batches(1024, row_groups=[group], columns=[reading.field])
                values = (value for batch in batches for value in batch[0])
                for row, value in enumerate(values, start=first):
                    if row >= skip:
                        text = text_of(value.as_py(), reading, f"{path} row {row}")
                        yield Document(text, size * (row + 1) // total)
            first += rows
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise AmorError(
            f"{path} is not a whole parquet file of text ({reason}); copy it again"
        ) from error
