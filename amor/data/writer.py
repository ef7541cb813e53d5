"""Writes one split: tokens appended to shards of equal size, restartable at any point the journal holds."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np

from amor.data.shards import Shard, dtype_for, little_endian
from amor.errors import AmorError
from amor.files import replace_file


@dataclass
class Written:
    """What a split holds up to a document boundary: the finished shards and the tokens in the one begun after them."""

    shards: list[Shard] = field(default_factory=list)
    part: int = 0
    documents: int = 0
    text_bytes: int = 0
    by_source: dict[str, int] = field(default_factory=dict)  # documents from each source

    @classmethod
    def from_dict(cls, held: dict[str, Any]) -> Written:
        return cls(**{**held, "shards": [Shard(**s) for s in held["shards"]]})

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def tokens(self) -> int:
        return sum(s.tokens for s in self.shards) + self.part


@contextmanager
def disk(path: Path) -> Iterator[None]:
    """A disk that is full or not ours is the user's to mend; what was written so far stays."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS):
            raise
        words = f"{path} cannot be written ({error.strerror}); make room and run the same command again, it goes on from there"
        raise AmorError(words) from error


class Writer:
    """Appends tokens. Until the manifest is written the journal alone says which bytes count."""

    def __init__(self, folder: Path, vocab: int, shard_tokens: int, written: Written) -> None:
        self.folder, self.shard_tokens, self.written = folder, shard_tokens, written
        self.dtype = little_endian(dtype_for(vocab))
        self._file: IO[bytes] | None = None
        self._digest = hashlib.sha256()
        folder.mkdir(parents=True, exist_ok=True)
        self._return_to_journal()

    def _path(self) -> Path:
        return self.folder / f"{len(self.written.shards):05d}.bin"

    def _return_to_journal(self) -> None:
        """Forget what was written after the journal: cut the shard that was begun, remove those behind it."""
        kept = {s.file for s in self.written.shards} | ({self._path().name} if self.written.part else set())
        for path in self.folder.glob("*.bin"):
            if path.name not in kept:
                path.unlink()
        sizes = [(self.folder / s.file, s.tokens) for s in self.written.shards]
        sizes += [(self._path(), self.written.part)] if self.written.part else []
        for path, tokens in sizes:
            if not path.is_file() or path.stat().st_size < tokens * self.dtype.itemsize:
                raise AmorError(f"{path} is shorter than the journal says; begin again with --overwrite")
        if self.written.part:
            os.truncate(self._path(), self.written.part * self.dtype.itemsize)
            self._digest.update(self._path().read_bytes())

    def append(self, tokens: np.ndarray) -> None:
        with disk(self.folder):
            while len(tokens):
                if self._file is None:
                    self._file = self._path().open("ab")
                taken, tokens = np.split(tokens, [self.shard_tokens - self.written.part])
                held = taken.astype(self.dtype).tobytes()
                self._file.write(held)
                self._digest.update(held)
                self.written.part += len(taken)
                if self.written.part == self.shard_tokens:
                    self._finish_shard()

    def count(self, source: str, text_bytes: int) -> None:
        """A document is whole."""
        self.written.documents += 1
        self.written.text_bytes += text_bytes
        self.written.by_source[source] = self.written.by_source.get(source, 0) + 1

    def sync(self) -> None:
        """Everything appended so far is on the disk when this returns, so that a journal may say so."""
        if self._file is not None:
            with disk(self.folder):
                self._file.flush()
                os.fsync(self._file.fileno())

    def finish(self) -> None:
        if self.written.part:
            self._finish_shard()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _finish_shard(self) -> None:
        self.sync()
        name = self._path().name
        self.close()
        self.written.shards.append(Shard(name, self.written.part, self._digest.hexdigest()))
        self.written.part, self._digest = 0, hashlib.sha256()


def write_whole(path: Path, text: str) -> None:
    """Write a small file so that no reader sees half of it. What a kill leaves beside it, the next write takes."""
    with disk(path):
        replace_file(path, text, mark="part")  # a lock keeps others away
