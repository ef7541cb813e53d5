"""Writes one split: tokens appended to shards of equal size, restartable at any point the journal
holds.
"""

from __future__ import annotations

import hashlib
import os
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import numpy as np

from amor.data.shards import MOST_FILES, Shard, SourceName, digest_of, dtype_for, little_endian
from amor.errors import AmorError
from amor.files import disk_errors, replace_file
from amor.typed import Count, Positive


@dataclass
class Written:
    """Content of a split; in a journal, up to a document boundary."""

    shards: list[Shard] = field(default_factory=list)  # the full ones
    part: Count = 0  # tokens in the shard begun after them
    documents: Count = 0
    text_bytes: Count = 0
    # documents from each source
    by_source: dict[SourceName, Positive] = field(default_factory=dict)

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

    def __init__(self, folder: Path, vocab: int, shard_tokens: int, written: Written) -> None:
        """written: what a journal has of the split; kept up to date."""
        self.folder, self.shard_tokens, self.written = folder, shard_tokens, written
        self.dtype = little_endian(dtype_for(vocab))
        self._file: IO[bytes] | None = None
        self._digest = hashlib.sha256()
        with disk(folder):
            folder.mkdir(parents=True, exist_ok=True)
            self._return_to_journal()

    def _path(self) -> Path:
        return self.folder / f"{len(self.written.shards):05d}.bin"

    def _return_to_journal(self) -> None:
        """Cut the shard that was begun, and remove those after it, as the journal has them."""
        shards, part = self.written.shards, self.written.part
        wanted = [(f"{number:05d}.bin", self.shard_tokens) for number in range(len(shards))]
        if part >= self.shard_tokens or [(s.file, s.tokens) for s in shards] != wanted:
            raise AmorError(
                f"{self.folder}: the journal's shards are not 00000.bin, ... of "
                f"{self.shard_tokens:,} tokens; {AGAIN}"
            )
        sizes = {self.folder / s.file: s.tokens for s in shards}
        sizes |= {self._path(): part} if part else {}
        for path in self.folder.glob("*.bin"):
            if path not in sizes:
                path.unlink()
        for path, tokens in sizes.items():
            if not path.is_file() or path.stat().st_size < tokens * self.dtype.itemsize:
                raise AmorError(f"{path} is shorter than in the journal; {AGAIN}")
        if part:
            os.truncate(self._path(), part * self.dtype.itemsize)
            self._digest = digest_of(self._path())

    def append(self, tokens: np.ndarray) -> None:
        """Write tokens, and begin a new shard where one is full."""
        with disk(self.folder):
            while len(tokens):
                if self._file is None:
                    if len(self.written.shards) >= MOST_FILES:
                        raise AmorError(
                            f"{self.folder}: more than {MOST_FILES:,} shards of "
                            f"{self.shard_tokens:,} tokens; give a larger --shard-tokens, "
                            "and --overwrite"
                        )
                    self._file = self._path().open("ab")
                taken, tokens = np.split(tokens, [self.shard_tokens - self.written.part])
                data = taken.astype(self.dtype).tobytes()
                self._file.write(data)
                self._digest.update(data)
                self.written.part += len(taken)
                if self.written.part == self.shard_tokens:
                    self._finish_shard()

    def count(self, source: str, text_bytes: int) -> None:
        """Count a document whose every token was appended."""
        written = self.written
        written.documents += 1
        written.text_bytes += text_bytes
        written.by_source[source] = written.by_source.get(source, 0) + 1

    def sync(self) -> None:
        """Return once everything appended so far is on the disk."""
        if self._file is not None:
            with disk(self.folder):
                self._file.flush()
                os.fsync(self._file.fileno())

    def finish(self) -> None:
        """Close the last shard."""
        if self.written.part:
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
        self.written.shards.append(Shard(name, self.written.part, self._digest.hexdigest()))
        self.written.part, self._digest = 0, hashlib.sha256()


def write_whole(path: Path, text: str) -> None:
    """Write a small file atomically; the next write removes what a kill has left beside it."""
    with disk(path):
        replace_file(path, text, mark="part")  # a lock keeps others away
