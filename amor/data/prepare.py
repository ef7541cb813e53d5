"""Text -> shards: reads documents, encodes them in parallel, writes a train and a validation split, survives a kill.

FOLDER/tokenizer.json   FOLDER/train/{manifest.json, 00000.bin, ...}   FOLDER/valid/...   FOLDER/prepare.json (the journal)
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from tokenizers import Tokenizer

from amor import typed
from amor.data.encode import encoded
from amor.data.encoder import Encoder
from amor.data.journal import JOURNAL, Journal, Place, Plan, Planned, differs
from amor.data.shards import (
    MANIFEST,
    MOST_SHARD,
    TOKENIZER,
    Manifest,
    Origin,
    Shards,
    Split,
    dtype_for,
)
from amor.data.sources import Reading, Source, find_sources
from amor.data.tokenizer import bpe_size, end_of_text, load, tokenizer_hash, train_bpe
from amor.data.writer import AGAIN, Writer, Written, disk, write_whole
from amor.errors import AmorError
from amor.files import disk_errors, folder_to_write
from amor.progress import Progress
from amor.vocabulary import load_file, vocabulary

LOCK = ".lock"
SPLITS: tuple[Split, ...] = ("train", "valid")
MOST_WORKERS = 1024
PIECE = 1 << 18  # characters encoded at a time: small enough to share one long document among workers
PARCEL = 1 << 20  # characters sent to a worker at a time
SAMPLE = 1 << 28  # characters a BPE is trained on at most, from the beginning of the training documents


@dataclass(frozen=True)
class Request:
    """What is asked for. Everything here decides the result; how many workers do it does not."""

    inputs: tuple[str, ...]
    tokenizer: str
    valid: float = 0.0  # share of documents held out
    valid_inputs: tuple[str, ...] = ()
    reading: Reading = field(default_factory=Reading)
    shard_tokens: int = 1 << 26
    end_of_text: str | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.valid < 1:
            raise AmorError(f"a validation share of {self.valid} is not in [0, 1); 0.05 holds out a twentieth of the documents")
        if self.valid and self.valid_inputs:
            raise AmorError("both a validation share and validation files are given; give one")
        if not 1 <= self.shard_tokens <= MOST_SHARD:
            raise AmorError(f"shards of {self.shard_tokens} tokens; give 1 to {MOST_SHARD:,}")
        bpe_size(self.tokenizer)


class Piece(NamedTuple):
    """Part of a document, on its way to a split. The last part closes the document and says how long all of it was."""

    split: Split
    place: Place
    last: bool
    text_bytes: int
    seen: int


class Preparation:
    """One run of `prepare`: the request, its sources, and the folder it writes."""

    def __init__(self, request: Request, out: str | Path, workers: int | None = None, save_every: float = 10.0) -> None:
        self.request, self.out, self.save_every = request, Path(out), save_every
        self.workers = len(os.sched_getaffinity(0)) if workers is None else workers
        if not 1 <= self.workers <= MOST_WORKERS:
            raise AmorError(f"{self.workers} workers; give 1 to {MOST_WORKERS:,}")
        train = find_sources(list(request.inputs), request.reading)
        held = find_sources(list(request.valid_inputs), request.reading) if request.valid_inputs else []
        both = {s.name for s in train} & {s.name for s in held}
        if both:
            raise AmorError(f"{sorted(both)[0]} is given for training and for validation; give it once")
        self.sources: list[tuple[Split, Source]] = [("train", s) for s in train] + [("valid", s) for s in held]
        self.splits = SPLITS if held or request.valid else SPLITS[:1]

    def run(self, overwrite: bool = False) -> dict[Split, Shards]:
        """Write what is missing and return the splits. A finished folder is opened, a stopped one is continued."""
        folder_to_write(self.out)
        with _alone(self.out):
            journal = None if overwrite else self._found()
            if journal is None:
                journal = self._begin()
            if not journal.done:
                self._write(journal)
        return {split: Shards.open(self.out / split) for split in self.splits}

    def plan(self) -> Plan:
        sources = tuple(Planned(split, s.name, s.bytes, s.changed) for split, s in self.sources)
        asked = self.request
        return Plan(1, sources, asked.tokenizer, asked.valid, asked.reading, asked.shard_tokens, asked.end_of_text)

    def _found(self) -> Journal | None:
        journal = Journal.load(self.out / JOURNAL)
        if journal is None:
            there = [split for split in SPLITS if (self.out / split).exists()]
            if there:
                raise AmorError(f"{self.out / there[0]} exists and was not begun by `amor prepare`; choose another --out")
            return None
        changes = differs(journal.plan, self.plan())
        begun = journal.done or any(w.tokens for w in journal.written.values())
        if changes and not begun:
            return None  # an attempt that failed at its first document is in nobody's way
        if changes:
            state = "data prepared" if journal.done else "an unfinished preparation"
            raise AmorError(f"{self.out} holds {state} otherwise ({'; '.join(changes)}); use another --out, or --overwrite")
        gone = [split for split in self.splits if journal.done and not (self.out / split / MANIFEST).exists()]
        if gone:
            raise AmorError(f"{self.out / gone[0] / MANIFEST} is gone, though the preparation ended; {AGAIN}")
        return journal

    def _begin(self) -> Journal:
        """A clean folder, and the tokenizer before anything else: from then on only its file counts."""
        for split in SPLITS:
            shutil.rmtree(self.out / split, ignore_errors=True)
        with disk(self.out):
            (self.out / JOURNAL).unlink(missing_ok=True)
        size = bpe_size(self.request.tokenizer)
        tokenizer = load(self.request.tokenizer) if size is None else self._trained(size)
        end_of_text(tokenizer, self.request.end_of_text)
        write_whole(self.out / TOKENIZER, tokenizer.to_str())
        fresh = {split: Written() for split in self.splits}
        journal = Journal(plan=self.plan(), next=Place(0, 0), written=fresh, tokenizer_hash=tokenizer_hash(tokenizer))
        self._save(journal)
        return journal

    def _save(self, journal: Journal) -> None:
        write_whole(self.out / JOURNAL, typed.text(journal))

    def _trained(self, size: int) -> Tokenizer:
        total = sum(s.bytes or 0 for _, s in self.sources) or None
        with Progress(f"reading text for bpe:{size}", total, "B") as progress:
            return train_bpe(self._sample(progress), size)

    def _sample(self, progress: Progress) -> Iterator[str]:
        left = SAMPLE
        for split, _, text, seen in self._documents(Place(0, 0)):
            progress.to(seen)
            if split == "train" and left > 0:
                yield text[:left]
                left -= len(text)
            if left <= 0:
                return

    def _documents(self, start: Place) -> Iterator[tuple[Split, Place, str, int]]:
        """Split, place, text and bytes seen so far, of every document from `start` on."""
        before = sum(s.bytes or 0 for _, s in self.sources[: start.source])
        for index, (split, source) in islice(enumerate(self.sources), start.source, None):
            skip = start.document if index == start.source else 0
            for number, document in enumerate(source.documents(skip), start=skip):
                chosen: Split = "valid" if split == "train" and self._held_out(document.text) else split
                yield chosen, Place(index, number), document.text, before + document.seen
            before += source.bytes or 0

    def _held_out(self, text: str) -> bool:
        """Chosen by the text itself, so that two copies of a document never stand on both sides."""
        if not self.request.valid:
            return False
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) < self.request.valid * 2**64

    def _parcels(self, start: Place, encoder: Encoder) -> Iterator[tuple[list[Piece], list[str]]]:
        """Documents cut into pieces and packed for the workers; a text of white space only is left out."""
        labels: list[Piece] = []
        texts: list[str] = []
        size = 0
        for split, place, text, seen in self._documents(start):
            if not text.strip():
                continue
            parts = encoder.pieces(text, PIECE)
            for number, part in enumerate(parts, start=1):
                labels.append(Piece(split, place, number == len(parts), len(text.encode()), seen))
                texts.append(part)
                size += len(part)
                if size >= PARCEL:
                    yield labels, texts
                    labels, texts, size = [], [], 0
        if labels:
            yield labels, texts

    def _write(self, journal: Journal) -> None:
        tokenizer = load_file(self.out / TOKENIZER)
        if journal.tokenizer_hash not in (None, tokenizer_hash(tokenizer)):
            raise AmorError(f"{self.out / TOKENIZER} is not the tokenizer this preparation began with; {AGAIN}")
        vocab, end = vocabulary(tokenizer), end_of_text(tokenizer, self.request.end_of_text)
        writers = {s: Writer(self.out / s, vocab, self.request.shard_tokens, journal.written[s]) for s in self.splits}
        parcels = self._parcels(journal.next, Encoder(tokenizer, dtype_for(vocab)))
        total = sum(s.bytes or 0 for _, s in self.sources) or None
        try:
            with Progress(f"preparing {self.out}", total, "B") as progress:
                for labels, ids in encoded(parcels, self.out / TOKENIZER, dtype_for(vocab), self.workers):
                    journal = self._append(journal, writers, labels, ids, end)
                    progress.to(labels[-1].seen, f"{sum(w.tokens for w in writers.values()):,} tokens")
        finally:
            for writer in writers.values():
                writer.close()
        self._finish(journal, writers, vocab, end, tokenizer_hash(tokenizer))

    def _append(
        self, journal: Journal, writers: dict[Split, Writer], labels: list[Piece], ids: list[np.ndarray], end: int
    ) -> Journal:
        """The journal after these pieces, which is on the disk now and then."""
        for piece, tokens in zip(labels, ids):
            writer = writers[piece.split]
            writer.append(tokens)
            if piece.last:
                writer.append(np.array([end], dtype=writer.dtype))
                writer.count(self.sources[piece.place.source][1].name, piece.text_bytes)
                journal = msgspec.structs.replace(journal, next=Place(piece.place.source, piece.place.document + 1))
                self._save_now_and_then(journal, writers)
        return journal

    _saved = 0.0

    def _save_now_and_then(self, journal: Journal, writers: dict[Split, Writer]) -> None:
        if time.monotonic() - self._saved >= self.save_every:
            for writer in writers.values():
                writer.sync()
            self._save(msgspec.structs.replace(journal, written=_held(writers)))
            self._saved = time.monotonic()

    def _finish(self, journal: Journal, writers: dict[Split, Writer], vocab: int, end: int, tokenizer: str) -> None:
        for split, writer in writers.items():
            if not writer.documents:
                raise AmorError(self._nothing(split, writers))
            writer.finish()
        for split, writer in writers.items():
            manifest = Manifest(
                dtype=dtype_for(vocab),
                vocab=vocab,
                tokenizer_hash=tokenizer,
                end_of_text=end,
                tokens=writer.tokens,
                documents=writer.documents,
                text_bytes=writer.text_bytes,
                shard_tokens=self.request.shard_tokens,
                shards=tuple(writer.shards),
                sources=tuple(Origin(name, count) for name, count in writer.by_source.items()),
            )
            write_whole(self.out / split / MANIFEST, typed.text(manifest))
        self._save(msgspec.structs.replace(journal, written=_held(writers), done=True))

    def _nothing(self, split: Split, writers: dict[Split, Writer]) -> str:
        if split == "valid" and self.request.valid:
            count = writers["train"].documents
            return (
                f"none of the {count:,} documents fell into the validation share of {self.request.valid}; raise --valid, "
                "name files with --valid-files, or cut .txt files into documents with --separator"
            )
        names = ", ".join(s.name for kind, s in self.sources if kind == split)
        return f"no document with text for {split} in {names}; give inputs that hold text"


def _held(writers: dict[Split, Writer]) -> dict[Split, Written]:
    return {split: writer.written for split, writer in writers.items()}


@contextmanager
def _alone(out: Path) -> Iterator[None]:
    """Two preparations in one folder would write into each other; the lock ends with the process, however it ends."""
    with disk_errors(out):
        file = (out / LOCK).open("w")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise AmorError(f"another `amor prepare` is writing {out}; wait for it or choose another --out") from error
        yield


def prepare(request: Request, out: str | Path, workers: int | None = None, overwrite: bool = False) -> dict[Split, Shards]:
    """Write (or continue, or open) the shards of a request: split name -> opened shards."""
    return Preparation(request, out, workers).run(overwrite)
