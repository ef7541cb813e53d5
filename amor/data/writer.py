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

from amor.data.shards import MOST_FILES, Shard, SourceName, digest_of, dtype_for, little_endian
from amor.errors import AmorError
from amor.files import disk_errors, replace_file
from amor.typed import Count, Positive


@dataclass(frozen=True)
class Written:
    """Content of a split up to a document boundary."""

    shards: tuple[Shard, ...] = ()  # the full ones
    part: Count = 0  # tokens in the shard begun after them
    documents: Count = 0
    text_bytes: Count = 0
    # documents from each source
    by_source: Mapping[SourceName, Positive] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """Tokens in all."""
        return sum(s.tokens for s in self.shards) + self.part


def disk(path: Path) -> AbstractContextManager[None]:
    """Turn errors of the disk into an AmorError; what was written so far stays."""
    return disk_errors(path, "mend that and run the same command again, it goes on from there")


AGAIN = "begin again with --overwrite"


class ShardWriter:
    """Appends tokens to a split. Until its manifest is written, the journal decides which bytes
    count.
    """

    def __init__(self, folder: Path, vocab: int, shard_tokens: int, begun: Written) -> None:
        self.folder, self.shard_tokens = folder, shard_tokens
        self.dtype = little_endian(dtype_for(vocab))
        self.shards, self.part = list(begun.shards), begun.part
        self.documents, self.text_bytes = begun.documents, begun.text_bytes
        self.by_source = dict(begun.by_source)
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
        """Tokens in all."""
        return self.written.tokens

    def _path(self) -> Path:
        return self.folder / f"{len(self.shards):05d}.bin"

    def _return_to_journal(self) -> None:
        """Cut the shard that was begun, and remove those after it, as the journal has them."""
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
                raise AmorError(f"{path} is shorter than in the journal; {AGAIN}")
        if self.part:
            os.truncate(self._path(), self.part * self.dtype.itemsize)
            self._digest = digest_of(self._path())

    def append(self, tokens: np.ndarray) -> None:
        """Write tokens, and begin a new shard where one is full."""
        with disk(self.folder):
            while len(tokens):
                if self._file is None:
                    if len(self.shards) >= MOST_FILES:
                        raise AmorError(
                            f"{self.folder}: more than {MOST_FILES:,} shards of "
                            f"{self.shard_tokens:,} tokens; give a larger --shard-tokens, "
                            "and --overwrite"
                        )
                    self._file = self._path().open("ab")
                taken, tokens = np.split(tokens, [self.shard_tokens - self.part])
                data = taken.astype(self.dtype).tobytes()
                self._file.write(data)
                self._digest.update(data)
                self.part += len(taken)
                if self.part == self.shard_tokens:
                    self._finish_shard()

    def count(self, source: str, text_bytes: int) -> None:
        """Count a document whose every token was appended."""
        self.documents += 1
        self.text_bytes += text_bytes
        self.by_source[source] = self.by_source.get(source, 0) + 1

    def sync(self) -> None:
        """Return once everything appended so far is on the disk."""
        if self._file is not None:
            with disk(self.folder):
                self._file.flush()
                os.fsync(self._file.fileno())

    def finish(self) -> None:
        """Close the last shard."""
        if self.part:
            self._finish_shard()

    def close(self) -> None:
        """Close the file; a second call does nothing."""
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
    """Write a small file atomically; the next write removes what a kill has left beside it."""
    with disk(path):
        replace_file(path, text, mark="part")  # a lock keeps others away
