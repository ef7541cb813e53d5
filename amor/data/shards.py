"""Shards: a long stream of tokens on disk, in files of equal size with a manifest that says what they must hold.

A split is a folder: `manifest.json` and `00000.bin`, `00001.bin`, ... of little-endian token ids; every shard but the last
holds the same number. `Shards.open` checks what is cheap (fields, files, sizes); `Shards.verify` reads every byte.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
import numpy as np
from msgspec import Meta

from amor import typed
from amor.checks import MOST_TOKENS
from amor.errors import AmorError
from amor.progress import Progress
from amor.typed import Count, Positive
from amor.vocabulary import load_file

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MANIFEST, TOKENIZER = "manifest.json", "tokenizer.json"
BLOCK = 1 << 24  # bytes hashed at a time
MOST_SHARD = 1 << 40  # tokens in one file

Split = Literal["train", "valid"]
Dtype = Literal["uint16", "uint32"]
Vocab = Annotated[int, Meta(ge=1, le=MOST_TOKENS)]
Sha256 = Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]
FileName = Annotated[str, Meta(pattern=r"\A[0-9]{5,9}\.bin\Z")]  # so it cannot lead out of the folder
SourceName = Annotated[str, Meta(min_length=1, max_length=8192)]  # a path, or hf:NAME
ShardTokens = Annotated[int, Meta(ge=1, le=MOST_SHARD)]


@dataclass(frozen=True)
class Shard:
    """One file of a split: its name, how many tokens it holds, and the sha256 of its bytes."""

    file: FileName
    tokens: ShardTokens
    sha256: Sha256


@dataclass(frozen=True)
class Origin:
    """How many documents of a split are from one source."""

    name: SourceName
    documents: Positive


class Manifest(typed.File, frozen=True, kw_only=True, rename={"version": "format"}):
    """What a split must hold. It has no date and no machine in it: the same input gives the same bytes."""

    version: int = 1  # on disk "format"
    dtype: Dtype  # the smaller one that holds the vocabulary
    vocab: Vocab
    tokenizer_hash: Sha256
    end_of_text: Count  # the token that closes every document
    tokens: Positive
    documents: Positive
    text_bytes: Count  # of the documents in UTF-8: bits a byte compare across tokenizers
    shard_tokens: ShardTokens  # tokens in every shard but the last
    shards: tuple[Shard, ...]
    sources: tuple[Origin, ...]

    @classmethod
    def load(cls, folder: Path) -> Manifest:
        """The manifest of a split, which must not contradict itself."""
        path = folder / MANIFEST
        if not path.exists():
            raise AmorError(f"{folder} holds no {MANIFEST}; {_where_instead(folder)}")
        try:
            found = typed.read(cls, path)
        except AmorError as error:
            raise AmorError(f"{error}; prepare the data again") from None
        wrong = found._contradiction()
        if wrong:
            raise AmorError(f"{path} contradicts itself ({wrong}); prepare the data again")
        return found

    def _contradiction(self) -> str:
        counts = [s.tokens for s in self.shards]
        if sum(counts) != self.tokens:
            return f"tokens {self.tokens:,}, in shards {sum(counts):,}"
        if any(n != self.shard_tokens for n in counts[:-1]) or counts[-1] > self.shard_tokens:
            return f"shards of other sizes than shard_tokens {self.shard_tokens:,}"
        if self.dtype != dtype_for(self.vocab):
            return f"dtype {self.dtype}, vocab {self.vocab:,}"
        if self.end_of_text >= self.vocab:
            return f"end_of_text {self.end_of_text:,}, vocab {self.vocab:,}"
        return ""


def _where_instead(folder: Path) -> str:
    inside = sorted(p.parent.name for p in folder.glob(f"*/{MANIFEST}"))
    if inside:
        return f"its splits do: give {folder / inside[0]}"
    if (folder.parent / "prepare.json").is_file():
        return "its preparation did not end; run the same `amor prepare` again, it goes on where it stopped"
    return "write one with `amor prepare INPUT --out FOLDER`"


def dtype_for(vocab: int) -> Dtype:
    """The smaller of uint16 and uint32 that holds every id below vocab."""
    return "uint16" if vocab <= 1 << 16 else "uint32"


def little_endian(dtype: str) -> np.dtype:
    """The dtype as it is on disk, whatever the machine."""
    return np.dtype(dtype).newbyteorder("<")


def sha256_of(path: Path, seen: Callable[[int], None] = lambda _: None) -> str:
    return digest_of(path, seen).hexdigest()


def digest_of(path: Path, seen: Callable[[int], None] = lambda _: None) -> hashlib._Hash:
    """The sha256 of a file, which more can be added to."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
            seen(len(block))
    return digest


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
        for path, shard in self.files():
            wanted = shard.tokens * little_endian(self.manifest.dtype).itemsize
            if not path.is_file():
                raise AmorError(f"{path} is missing; copy the folder again or prepare the data again")
            if path.stat().st_size != wanted:
                raise AmorError(f"{path} has {path.stat().st_size:,} bytes instead of {wanted:,}; copy it or prepare it again")

    def files(self) -> Iterator[tuple[Path, Shard]]:
        return ((self.folder / s.file, s) for s in self.manifest.shards)

    def verify(self) -> None:
        """Read every byte and compare it with the manifest's sha256; the first wrong shard is an error."""
        size = self.tokens * little_endian(self.manifest.dtype).itemsize
        with Progress(f"verifying {self.folder}", size, unit="B") as progress:
            for path, shard in self.files():
                try:
                    found = sha256_of(path, progress.add)
                except OSError as error:
                    raise AmorError(f"{path} cannot be read ({error.strerror}); copy it or prepare it again") from error
                if found != shard.sha256:
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
        seen = {key: value for key, value in msgspec.to_builtins(self.manifest).items() if key != "sources"}
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
        from amor.data.tokenizer import tokenizer_hash

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
            if piece.max() >= self.vocab:  # here: a row that no embedding has is met by every reader, and costs microseconds
                raise self._beyond(index, offset, piece)
            out[done : done + len(piece)] = piece
            done += len(piece)
        return out

    def _beyond(self, index: int, offset: int, piece: np.ndarray) -> AmorError:
        path, place = self.folder / self.manifest.shards[index].file, int(np.argmax(piece >= self.vocab))
        words = f"token {piece[place]:,} at place {offset + place:,} is beyond the vocabulary of {self.vocab:,}"
        return AmorError(f"{path}: {words}; copy it or prepare it again")

    def pieces(self, size: int = 1 << 22) -> Iterator[np.ndarray]:
        """The whole stream in order, a piece at a time."""
        for start in range(0, self.tokens, size):
            yield self.read(start, min(size, self.tokens - start))

    def _map(self, index: int) -> np.ndarray:
        if index not in self._maps:
            shard = self.manifest.shards[index]
            path = self.folder / shard.file
            try:
                found = np.memmap(path, dtype=little_endian(self.manifest.dtype), mode="r")
            except (OSError, ValueError) as error:  # gone, not ours to read, or of a size that is no number of tokens
                raise AmorError(f"{path} cannot be read ({error}); copy it or prepare it again") from error
            if len(found) != shard.tokens:
                raise AmorError(f"{path} holds {len(found):,} tokens instead of {shard.tokens:,}: it changed while it was read")
            self._maps[index] = np.asarray(found)  # a plain array: slices of a memmap cost more than what they hold
        return self._maps[index]


def splits(folder: str | Path) -> tuple[Shards, Shards | None]:
    """What is trained on and what is held out for validation: FOLDER/train and FOLDER/valid, as `amor prepare` writes them.

    FOLDER/train means the same as FOLDER. A folder that is a split by itself holds nothing out.
    """
    folder = Path(folder)
    if folder.name == "train" and (folder / MANIFEST).exists():
        folder = folder.parent
    elif (folder / MANIFEST).exists():
        return Shards.open(folder), None
    train = Shards.open(folder / "train")
    if not (folder / "valid").exists():
        return train, None
    valid = Shards.open(folder / "valid")
    valid.check(tokenizer_hash=train.tokenizer_hash)
    return train, valid
