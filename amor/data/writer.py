"""Writes one split: tokens appended to shards of equal size, restartable at any point the journal
holds.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import numpy as np

from amor.data.shards import Shard, SourceName, digest_of, dtype_for, little_endian
from amor.errors import AmorError
from amor.files import disk_errors, replace_file
from amor.typed import Count, Positive


@dataclass(frozen=True)
class Written:
    """What a split holds up to a document boundary: the finished shards and the tokens in the one
    begun after them.
    """

    shards: tuple[Shard, ...] = ()
    part: Count = 0
    documents: Count = 0
    text_bytes: Count = 0
    by_source: Mapping[SourceName, Positive] = field(
        default_factory=dict
    )  # documents from each source

    @property
    def tokens(self) -> int:
        return sum(s.tokens for s in self.shards) + self.part


def disk(path: Path) -> AbstractContextManager[None]:
    """A disk that is full or not ours is the user's to mend; what was written so far stays."""
    return disk_errors(path, "mend that and run the same command again, it goes on from there")


AGAIN = "begin again with --overwrite"


class Writer:
    """Appends tokens. Until the manifest is written the journal alone says which bytes count."""

    def __init__(self, folder: Path, vocab: int, shard_tokens: int, begun: Written) -> None:
        self.folder, self.shard_tokens = folder, shard_tokens
        self.dtype = little_endian(dtype_for(vocab))
        self.shards, self.part = list(begun.shards), begun.part
        self.documents, self.text_bytes, self.by_source = (
            begun.documents,
            begun.text_bytes,
            dict(begun.by_source),
        )
        self._file: IO[bytes] | None = None
        self._digest = hashlib.sha256()
        with disk(folder):
            folder.mkdir(parents=True, exist_ok=True)
            self._return_to_journal()

    @property
    def written(self) -> Written:
        """As a journal keeps it, at a document boundary."""
        return Written(
            tuple(self.shards), self.part, self.documents, self.text_bytes, dict(self.by_source)
        )

    @property
    def tokens(self) -> int:
        return self.written.tokens

    def _path(self) -> Path:
        return self.folder / f"{len(self.shards):05d}.bin"

    def _return_to_journal(self) -> None:
        """Forget what was written after the journal: cut the shard that was begun, remove those
        behind it.
        """
        wanted = [(f"{number:05d}.bin", self.shard_tokens) for number in range(len(self.shards))]
        if self.part >= self.shard_tokens or [(s.file, s.tokens) for s in self.shards] != wanted:
            raise AmorError(
                f"{self.folder}: the journal's shards are not 00000.bin, ... of "
                f"{self.shard_tokens:,} tokens; {AGAIN}"
            )
        sizes = {self.folder / s.file: s.tokens for s in self.shards} | (
            {self._path(): self.part} if self.part else {}
        )
        for path in self.folder.glob("*.bin"):
            if path not in sizes:
                path.unlink()
        for path, tokens in sizes.items():
            if not path.is_file() or path.stat().st_size < tokens * self.dtype.itemsize:
                raise AmorError(f"{path} is shorter than the journal says; {AGAIN}")
        if self.part:
            os.truncate(self._path(), self.part * self.dtype.itemsize)
            self._digest = digest_of(self._path())

    def append(self, tokens: np.ndarray) -> None:
        with disk(self.folder):
            while len(tokens):
                if self._file is None:
                    self._file = self._path().open("ab")
                taken, tokens = np.split(tokens, [self.shard_tokens - self.part])
                held = taken.astype(self.dtype).tobytes()
                self._file.write(held)
                self._digest.update(held)
                self.part += len(taken)
                if self.part == self.shard_tokens:
                    self._finish_shard()

    def count(self, source: str, text_bytes: int) -> None:
        """A document is whole."""
        self.documents += 1
        self.text_bytes += text_bytes
        self.by_source[source] = self.by_source.get(source, 0) + 1

    def sync(self) -> None:
        """Everything appended so far is on the disk when this returns, so that a journal may say
        so.
        """
        if self._file is not None:
            with disk(self.folder):
                self._file.flush()
                os.fsync(self._file.fileno())

    def finish(self) -> None:
        if self.part:
            self._finish_shard()

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with disk(self.folder):
                file.close()

    def _finish_shard(self) -> None:
        self.sync()
        name = self._path().name
        self.close()
        self.shards.append(Shard(name, self.part, self._digest.hexdigest()))
        self.part, self._digest = 0, hashlib.sha256()


def write_whole(path: Path, text: str) -> None:
    """Write a small file so that no reader sees half of it. What a kill leaves beside it, the next
    write takes.
    """
    with disk(path):
        replace_file(path, text, mark="part")  # a lock keeps others away
