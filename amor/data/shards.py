"""Shards: a long stream of tokens on disk, in files of equal size with a manifest of their content.

A split is a folder: `manifest.json` and `00000.bin`, `00001.bin`, ... of little-endian token ids;
every shard but the last holds the same number. `Shards.open` checks what is cheap (fields, files,
sizes); `Shards.verify` reads every byte.
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
MOST_FILES = 4096  # of one split; a reader holds all of them open. 2^38 tokens at the default size
MEND = "copy it or prepare it again"

Split = Literal["train", "valid"]
Dtype = Literal["uint16", "uint32"]
Vocab = Annotated[int, Meta(ge=1, le=MOST_TOKENS)]
Sha256 = Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]
FileName = Annotated[
    str, Meta(pattern=r"\A[0-9]{5,9}\.bin\Z")
]  # so it cannot lead out of the folder
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
    """What a split must hold. It has no date and no machine in it: the same input gives the same
    bytes.
    """

    version: int = 1  # on disk "format"
    dtype: Dtype  # the smaller one that holds the vocabulary
    vocab: Vocab
    tokenizer_hash: Sha256
    end_of_text: Count  # the token that closes every document
    tokens: Positive
    documents: Positive
    text_bytes: Count  # of the documents in UTF-8: bits per byte compare across tokenizers
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
            manifest = typed.read(cls, path)
        except AmorError as error:
            raise AmorError(f"{error}; prepare the data again") from None
        wrong = manifest._contradiction()
        if wrong:
            raise AmorError(f"{path} contradicts itself ({wrong}); prepare the data again")
        return manifest

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
        return (
            "its preparation did not end; run the same `amor prepare` again, "
            "it goes on where it stopped"
        )
    return "write one with `amor prepare INPUT --out FOLDER`"


def dtype_for(vocab: int) -> Dtype:
    """The smaller of uint16 and uint32 that holds every id below vocab."""
    return "uint16" if vocab <= 1 << 16 else "uint32"


def little_endian(dtype: str) -> np.dtype:
    """The dtype as it is on disk, whatever the machine."""
    return np.dtype(dtype).newbyteorder("<")


def sha256_of(path: Path, on_read: Callable[[int], None] = lambda _: None) -> str:
    """sha256 of a file, in hex; on_read is called with the size of every block."""
    return digest_of(path, on_read).hexdigest()


def digest_of(path: Path, on_read: Callable[[int], None] = lambda _: None) -> hashlib._Hash:
    """sha256 of a file as an object that can be updated further."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
            on_read(len(block))
    return digest


class Shards:
    """An opened split: a flat stream of tokens, read from memory maps."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder, self.manifest = folder, manifest
        self._maps: dict[int, np.ndarray] = {}

    @classmethod
    def open(cls, folder: str | Path) -> Shards:
        """Open a split after the cheap checks: a valid manifest, every file, every size."""
        folder = Path(folder)
        shards = cls(folder, Manifest.load(folder))
        for path, shard in shards.files():
            wanted = shard.tokens * little_endian(shards.manifest.dtype).itemsize
            if not path.is_file():
                raise AmorError(
                    f"{path} is missing; copy the folder again or prepare the data again"
                )
            size = path.stat().st_size
            if size != wanted:
                raise AmorError(f"{path} has {size:,} bytes instead of {wanted:,}; {MEND}")
        return shards

    def files(self) -> Iterator[tuple[Path, Shard]]:
        """Path and manifest entry of every shard."""
        return ((self.folder / s.file, s) for s in self.manifest.shards)

    def verify(self) -> None:
        """Read every byte and compare its sha256 with the manifest's; a wrong shard is an error."""
        size = self.tokens * little_endian(self.manifest.dtype).itemsize
        with Progress(f"verifying {self.folder}", size, unit="B") as progress:
            for path, shard in self.files():
                try:
                    digest = sha256_of(path, progress.add)
                except OSError as error:
                    raise AmorError(f"{path} cannot be read ({error.strerror}); {MEND}") from error
                if digest != shard.sha256:
                    raise AmorError(f"{path} is corrupt (its sha256 is not the manifest's); {MEND}")

    @property
    def tokens(self) -> int:
        """Tokens in the stream."""
        return self.manifest.tokens

    @property
    def vocab(self) -> int:
        """Token ids are below this."""
        return self.manifest.vocab

    @property
    def end_of_text(self) -> int:
        """The token that ends every document."""
        return self.manifest.end_of_text

    @property
    def tokenizer_hash(self) -> str:
        """tokenizer.tokenizer_hash of the tokenizer that made the ids."""
        return self.manifest.tokenizer_hash

    @cached_property
    def hash(self) -> str:
        """Hash of what a model can see: the tokens and their meaning, not where they came from."""
        tree = {k: v for k, v in msgspec.to_builtins(self.manifest).items() if k != "sources"}
        return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()

    def check(self, vocab: int | None = None, tokenizer_hash: str | None = None) -> None:
        """Raise unless a model with this vocabulary and this tokenizer can read these tokens."""
        if vocab is not None and vocab < self.vocab:
            raise AmorError(
                f"the model has a vocabulary of {vocab:,}, {self.folder} was prepared for "
                f"{self.vocab:,}; make them equal"
            )
        if tokenizer_hash is not None and tokenizer_hash != self.tokenizer_hash:
            raise AmorError(
                f"{self.folder} was prepared with tokenizer {self.tokenizer_hash[:12]}, "
                f"not {tokenizer_hash[:12]}; prepare the data again with the tokenizer of the model"
            )

    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the shards, from beside or above them; its hash must be theirs."""
        from amor.data.tokenizer import tokenizer_hash

        for path in (self.folder / TOKENIZER, self.folder.parent / TOKENIZER):
            if path.is_file():
                tokenizer = load_file(path)
                self.check(tokenizer_hash=tokenizer_hash(tokenizer))
                return tokenizer
        raise AmorError(
            f"no {TOKENIZER} in {self.folder} or above it; copy it from where the data was prepared"
        )

    def read(self, start: int, count: int) -> np.ndarray:
        """Tokens start .. start + count - 1 of the stream, across shards, as int64."""
        if start < 0 or count < 0 or start + count > self.tokens:
            raise IndexError(f"tokens {start}..{start + count} of {self.tokens}")
        out = np.empty(count, dtype=np.int64)
        done = 0
        while done < count:
            index, offset = divmod(start + done, self.manifest.shard_tokens)
            piece = self._map(index)[offset : offset + count - done]
            # checked here, where every reader passes; it costs microseconds
            if piece.max() >= self.vocab:
                place = int(np.argmax(piece >= self.vocab))
                raise AmorError(
                    f"{self.folder / self.manifest.shards[index].file}: token {piece[place]:,} "
                    f"at place {offset + place:,} is beyond the vocabulary of {self.vocab:,}; "
                    f"{MEND}"
                )
            out[done : done + len(piece)] = piece
            done += len(piece)
        return out

    def pieces(self, size: int = 1 << 22) -> Iterator[np.ndarray]:
        """The whole stream in order, `size` tokens at a time."""
        for start in range(0, self.tokens, size):
            yield self.read(start, min(size, self.tokens - start))

    def _map(self, index: int) -> np.ndarray:
        if index not in self._maps:
            shard = self.manifest.shards[index]
            path = self.folder / shard.file
            try:
                tokens = np.memmap(path, dtype=little_endian(self.manifest.dtype), mode="r")
            except (OSError, ValueError) as error:  # ValueError: not a whole number of tokens
                raise AmorError(f"{path} cannot be read ({error}); {MEND}") from error
            if len(tokens) != shard.tokens:
                raise AmorError(
                    f"{path} holds {len(tokens):,} tokens instead of {shard.tokens:,}: it "
                    "changed while it was read"
                )
            # a plain array: slicing a memmap costs more than reading the slice
            self._maps[index] = np.asarray(tokens)
        return self._maps[index]


def splits(folder: str | Path) -> tuple[Shards, Shards | None]:
    """The training and the validation split of a folder that `amor prepare` wrote.

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
