"""Shards: a long stream of tokens on disk, in files of equal size with a manifest that says what they must hold.

A split is a folder: `manifest.json` and `00000.bin`, `00001.bin`, ... of little-endian token ids; every shard but the last
holds the same number. `Shards.open` checks what is cheap (fields, files, sizes); `Shards.verify` reads every byte.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from amor.data.progress import Progress
from amor.errors import AmorError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

FORMAT = 1
MANIFEST, TOKENIZER = "manifest.json", "tokenizer.json"
BLOCK = 1 << 24  # bytes hashed at a time


@dataclass(frozen=True)
class Shard:
    """One file of a split: its name, how many tokens it holds, and the sha256 of its bytes."""

    file: str
    tokens: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What a split must hold. It has no date and no machine in it: the same input gives the same bytes."""

    format: int
    dtype: str  # uint16 or uint32: the smaller one that holds the vocabulary
    vocab: int
    tokenizer_hash: str
    end_of_text: int  # the token that closes every document
    tokens: int
    documents: int
    text_bytes: int  # of the documents in UTF-8: bits a byte compare across tokenizers
    shard_tokens: int  # tokens in every shard but the last
    shards: tuple[Shard, ...]
    sources: tuple[dict[str, Any], ...]

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"

    @classmethod
    def load(cls, folder: Path) -> Manifest:
        path = folder / MANIFEST
        try:
            held = json.loads(path.read_text())
        except FileNotFoundError as error:
            raise AmorError(f"{folder} holds no {MANIFEST}; {_where_instead(folder)}") from error
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise AmorError(f"{path} is not JSON ({error}); prepare the data again") from error
        if not isinstance(held, dict) or held.get("format") != FORMAT:
            found = held.get("format") if isinstance(held, dict) else held
            raise AmorError(f"{path} has format {found!r}, this version reads {FORMAT}; prepare the data again")
        if held.keys() != {f.name for f in fields(cls)}:
            wrong = sorted(held.keys() ^ {f.name for f in fields(cls)})
            raise AmorError(f"{path} does not have the fields of a manifest (differs in {wrong}); prepare the data again")
        return cls(**{**held, "shards": tuple(Shard(**s) for s in held["shards"]), "sources": tuple(held["sources"])})


def _where_instead(folder: Path) -> str:
    inside = sorted(p.parent.name for p in folder.glob(f"*/{MANIFEST}"))
    if inside:
        return f"its splits do: give {folder / inside[0]}"
    if (folder.parent / "prepare.json").is_file():
        return "its preparation did not end; run the same `amor prepare` again, it goes on where it stopped"
    return "write one with `amor prepare INPUT --out FOLDER` and give FOLDER/train"


def dtype_for(vocab: int) -> str:
    """The smaller of uint16 and uint32 that holds every id below vocab."""
    return "uint16" if vocab <= 1 << 16 else "uint32"


def little_endian(dtype: str) -> np.dtype:
    """The dtype as it is on disk, whatever the machine."""
    return np.dtype(dtype).newbyteorder("<")


def sha256_of(path: Path, seen: Callable[[int], None] = lambda _: None) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
            seen(len(block))
    return digest.hexdigest()


class Shards:
    """An opened split: a flat stream of tokens, read from memory maps."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder, self.manifest = folder, manifest
        self._maps: dict[int, np.ndarray] = {}

    @classmethod
    def open(cls, folder: str | Path) -> Shards:
        """Open a split after the cheap checks: a readable manifest, every file there, every size right."""
        folder = Path(folder)
        shards = cls(folder, Manifest.load(folder))
        shards._check()
        return shards

    def _check(self) -> None:
        m = self.manifest
        counts = [s.tokens for s in m.shards]
        full = all(n == m.shard_tokens for n in counts[:-1]) and all(0 < n <= m.shard_tokens for n in counts)
        if m.tokens < 1 or sum(counts) != m.tokens or not full or m.dtype != dtype_for(m.vocab):
            raise AmorError(f"{self.folder / MANIFEST} contradicts itself (counts or dtype); prepare the data again")
        for path, shard in self.files():
            wanted = shard.tokens * little_endian(m.dtype).itemsize
            if not path.is_file():
                raise AmorError(f"{path} is missing; copy the folder again or prepare the data again")
            if path.stat().st_size != wanted:
                raise AmorError(f"{path} has {path.stat().st_size:,} bytes instead of {wanted:,}; copy it or prepare it again")

    def files(self) -> Iterator[tuple[Path, Shard]]:
        return ((self.folder / s.file, s) for s in self.manifest.shards)

    def verify(self) -> None:
        """Read every byte and compare it with the manifest's sha256; the first wrong shard is an error."""
        size = sum(path.stat().st_size for path, _ in self.files())
        with Progress(f"verifying {self.folder}", size, unit="B") as progress:
            for path, shard in self.files():
                if sha256_of(path, progress.add) != shard.sha256:
                    raise AmorError(f"{path} is corrupt (its sha256 is not the manifest's); copy it or prepare it again")

    @property
    def tokens(self) -> int:
        return self.manifest.tokens

    @property
    def vocab(self) -> int:
        return self.manifest.vocab

    @property
    def end_of_text(self) -> int:
        return self.manifest.end_of_text

    @property
    def tokenizer_hash(self) -> str:
        return self.manifest.tokenizer_hash

    @cached_property
    def hash(self) -> str:
        """A hash of what a model can see: the tokens and their meaning, not where they came from."""
        seen = {key: value for key, value in asdict(self.manifest).items() if key != "sources"}
        return hashlib.sha256(json.dumps(seen, sort_keys=True).encode()).hexdigest()

    def check(self, vocab: int | None = None, tokenizer_hash: str | None = None) -> None:
        """Raise unless a model with this vocabulary and this tokenizer can be trained on, or judged by, these tokens."""
        if vocab is not None and vocab < self.vocab:
            raise AmorError(
                f"the model has a vocabulary of {vocab:,}, {self.folder} was prepared for {self.vocab:,}; make them equal"
            )
        if tokenizer_hash is not None and tokenizer_hash != self.tokenizer_hash:
            raise AmorError(
                f"{self.folder} was prepared with tokenizer {self.tokenizer_hash[:12]}, not {tokenizer_hash[:12]}; "
                "prepare the data again with the tokenizer of the model"
            )

    def tokenizer(self) -> Tokenizer:
        """The tokenizer the shards were written with, found beside or above them and checked by its hash."""
        from amor.data.tokenizer import load_file, tokenizer_hash

        for path in (self.folder / TOKENIZER, self.folder.parent / TOKENIZER):
            if path.is_file():
                found = load_file(path)
                self.check(tokenizer_hash=tokenizer_hash(found))
                return found
        raise AmorError(f"no {TOKENIZER} in {self.folder} or above it; copy it from where the data was prepared")

    def read(self, start: int, count: int) -> np.ndarray:
        """Tokens start .. start + count - 1 of the stream, across shards, as int64."""
        if start < 0 or count < 0 or start + count > self.tokens:
            raise IndexError(f"tokens {start}..{start + count} of {self.tokens}")
        out = np.empty(count, dtype=np.int64)
        done = 0
        while done < count:
            index, offset = divmod(start + done, self.manifest.shard_tokens)
            piece = self._map(index)[offset : offset + count - done]
            out[done : done + len(piece)] = piece
            done += len(piece)
        return out

    def pieces(self, size: int = 1 << 22) -> Iterator[np.ndarray]:
        """The whole stream in order, a piece at a time."""
        for start in range(0, self.tokens, size):
            yield self.read(start, min(size, self.tokens - start))

    def _map(self, index: int) -> np.ndarray:
        if index not in self._maps:
            path = self.folder / self.manifest.shards[index].file
            self._maps[index] = np.memmap(path, dtype=little_endian(self.manifest.dtype), mode="r")
        return self._maps[index]
