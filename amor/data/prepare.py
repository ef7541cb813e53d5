"""Text -> shards: reads documents, encodes them in parallel, writes a train and a validation split.

FOLDER/tokenizer.json
FOLDER/train/{manifest.json, 00000.bin, ...}   FOLDER/valid/...
FOLDER/prepare.json   the journal: a preparation that was killed goes on from it
"""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from amor import typed
from amor.data.encoder import Encoder, encoded
from amor.data.journal import JOURNAL, Journal, Place, Plan, Planned, differences
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
from amor.data.sources import Document, DocumentSource, Reading, find_sources
from amor.data.tokenizer import bpe_size, end_of_text, load, tokenizer_hash, train_bpe
from amor.data.writer import AGAIN, ShardWriter, Written, disk, write_whole
from amor.errors import AmorError
from amor.files import folder_to_write, locked
from amor.progress import Progress
from amor.vocabulary import load_file, vocabulary

LOCK = ".lock"
SPLITS: tuple[Split, ...] = ("train", "valid")
MOST_WORKERS = 1024
PIECE = 1 << 18  # characters encoded at a time: workers can share one long document
PARCEL = 1 << 20  # characters sent to a worker at a time
SAMPLE = 1 << 28  # characters a BPE is trained on at most, from the first training documents


@dataclass(frozen=True)
class Request:
    """Everything that decides the result of a preparation; the number of workers does not.

    inputs: files, folders or hf:NAME.
    tokenizer: a name or path, as tokenizer.load takes it, or bpe:SIZE.
    valid: fraction of documents held out for validation, chosen by a hash of their text; of a
        single text file its end. Default 0: nothing.
    valid_inputs: files held out, in place of a fraction.
    reading: how sources are read.
    shard_tokens: tokens per file. Default 2^26: 128 or 256 MB, quick to hash and to copy.
    end_of_text: the token that ends a document. Default: the first of tokenizer.ENDS that exists.
    """

    inputs: tuple[str, ...]
    tokenizer: str
    valid: float = 0.0
    valid_inputs: tuple[str, ...] = ()
    reading: Reading = field(default_factory=Reading)
    shard_tokens: int = 1 << 26
    end_of_text: str | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.valid < 1:
            raise AmorError(
                f"a validation share of {self.valid} is not in [0, 1); "
                "0.05 holds out a twentieth of the documents"
            )
        if self.valid and self.valid_inputs:
            raise AmorError("both a validation share and validation files are given; give one")
        if not 1 <= self.shard_tokens <= MOST_SHARD:
            raise AmorError(f"shards of {self.shard_tokens} tokens; give 1 to {MOST_SHARD:,}")
        bpe_size(self.tokenizer)


class SplitDocument(NamedTuple):
    """A document and the split it belongs to."""

    split: Split
    place: Place
    text: str
    bytes_read: int  # of all sources up to it


class DocumentPart(NamedTuple):
    """Part of a document, on its way to a split; the last part ends the document."""

    document: SplitDocument
    last: bool


class Preparation:
    """One run of `prepare`: the request, its sources, and the folder it writes."""

    journal: Journal
    writers: dict[Split, ShardWriter]

    def __init__(
        self,
        request: Request,
        out: str | Path,
        workers: int | None = None,
        save_every: float = 10.0,
    ) -> None:
        """workers: processes; None: one per core. save_every: seconds between two journals."""
        self.request, self.out, self.save_every = request, Path(out), save_every
        self.workers = len(os.sched_getaffinity(0)) if workers is None else workers
        if not 1 <= self.workers <= MOST_WORKERS:
            raise AmorError(f"{self.workers} workers; give 1 to {MOST_WORKERS:,}")
        valid_inputs = list(request.valid_inputs)
        train = find_sources(list(request.inputs), request.reading)
        valid = find_sources(valid_inputs, request.reading) if valid_inputs else []
        both = {s.name for s in train} & {s.name for s in valid}
        if both:
            raise AmorError(
                f"{sorted(both)[0]} is given for training and for validation; give it once"
            )
        self.sources: list[tuple[Split, DocumentSource]] = [
            *(("train", s) for s in train),
            *(("valid", s) for s in valid),
        ]
        self.bytes = sum(s.bytes or 0 for _, s in self.sources) or None
        self.splits = SPLITS if valid or request.valid else SPLITS[:1]
        # a single text file is a single document: its end is held out, not all or nothing of it
        one_text = len(train) == 1 and train[0].one_document and not request.reading.separator
        self.cut = train[0].name if request.valid and one_text else None
        self._saved = 0.0  # when the journal was written last

    def run(self, overwrite: bool = False) -> dict[Split, Shards]:
        """Write what is missing and return the splits.

        A finished folder is opened, a stopped one is continued.
        """
        folder_to_write(self.out)
        with locked(self.out, LOCK, "amor prepare"):
            self.journal = (None if overwrite else self._read_journal()) or self._begin()
            if not self.journal.done:
                self._write()
        return {split: Shards.open(self.out / split) for split in self.splits}

    def plan(self) -> Plan:
        """The request and its sources as the journal keeps them."""
        sources = tuple(Planned(split, s.name, s.bytes, s.changed) for split, s in self.sources)
        r = self.request
        return Plan(1, sources, r.tokenizer, r.valid, r.reading, r.shard_tokens, r.end_of_text)

    def _read_journal(self) -> Journal | None:
        journal = Journal.load(self.out / JOURNAL)
        if journal is None:
            there = [split for split in SPLITS if (self.out / split).exists()]
            if there:
                raise AmorError(
                    f"{self.out / there[0]} exists and was not begun by `amor prepare`; "
                    "choose another --out"
                )
            return None
        changes = differences(journal.plan, self.plan())
        if changes and not journal.done and not any(w.tokens for w in journal.written.values()):
            return None  # an attempt that failed at its first document left nothing to keep
        if changes:
            state = "data prepared" if journal.done else "an unfinished preparation"
            raise AmorError(
                f"{self.out} holds {state} otherwise ({'; '.join(changes)}); "
                "use another --out, or --overwrite"
            )
        for manifest in (self.out / split / MANIFEST for split in self.splits):
            if journal.done and not manifest.exists():
                raise AmorError(f"{manifest} is gone, though the preparation ended; {AGAIN}")
        return journal

    def _begin(self) -> Journal:
        """A clean folder, and the tokenizer first: from then on its file alone is used."""
        for split in SPLITS:
            shutil.rmtree(self.out / split, ignore_errors=True)
        with disk(self.out):
            (self.out / JOURNAL).unlink(missing_ok=True)
        self._check_shares()
        size = bpe_size(self.request.tokenizer)
        name = self.request.tokenizer
        tokenizer = load(name) if size is None else train_bpe(self._sample(size), size)
        end_of_text(tokenizer, self.request.end_of_text)
        write_whole(self.out / TOKENIZER, tokenizer.to_str())
        journal = Journal(
            plan=self.plan(),
            next=Place(0, 0),
            written={split: Written() for split in self.splits},
            tokenizer_hash=tokenizer_hash(tokenizer),
        )
        write_whole(self.out / JOURNAL, typed.text(journal))
        return journal

    def _check_shares(self) -> None:
        """Refuse a validation share that no document falls into, before anything is encoded.

        Reading ends at the first document of each split, so it is short for a large corpus; a
        dataset of a hub is not read twice.
        """
        if not self.request.valid or any(s.name.startswith("hf:") for _, s in self.sources):
            return
        counts: Counter[Split] = Counter()
        for document in self._documents(Place(0, 0)):
            counts[document.split] += bool(document.text.strip())
            if all(counts[split] for split in self.splits):
                return
        for split in self.splits:
            if not counts[split]:
                raise AmorError(self._why_empty(split, counts))

    def _save(self) -> None:
        write_whole(self.out / JOURNAL, typed.text(self.journal))

    def _sample(self, size: int) -> Iterator[str]:
        left = SAMPLE
        with Progress(f"reading text for bpe:{size}", self.bytes, "B") as progress:
            for document in self._documents(Place(0, 0)):
                progress.to(document.bytes_read)
                if document.split == "train":
                    yield document.text[:left]
                    left -= len(document.text)
                if left <= 0:
                    return

    def _documents(self, start: Place) -> Iterator[SplitDocument]:
        """Every document from `start` on."""
        before = sum(s.bytes or 0 for _, s in self.sources[: start.source])
        for index, (split, source) in islice(enumerate(self.sources), start.source, None):
            skip = start.document if index == start.source else 0
            documents = self._halves(source)[skip:] if self.cut else source.documents(skip)
            for number, document in enumerate(documents, start=skip):
                held_out = number == 1 if self.cut else self._held_out(document.text)
                chosen: Split = "valid" if held_out and split == "train" else split
                bytes_read = before + document.bytes_read
                yield SplitDocument(chosen, Place(index, number), document.text, bytes_read)
            before += source.bytes or 0

    def _halves(self, source: DocumentSource) -> list[Document]:
        """The only document of a source as two: what is trained on, and the share held out."""
        (document,) = source.documents()
        text, size = document.text, document.bytes_read
        at = round(len(text) * (1 - self.request.valid))
        line = text.rfind("\n", 0, at) + 1
        at = line or at  # at the beginning of a line where there is one
        return [Document(text[:at], size * at // max(len(text), 1)), Document(text[at:], size)]

    def _held_out(self, text: str) -> bool:
        """Decided by the text itself, so that two copies of a document are on the same side."""
        if not self.request.valid:
            return False
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        return int.from_bytes(digest) < self.request.valid * 2**64

    def _parcels(
        self, start: Place, encoder: Encoder
    ) -> Iterator[tuple[list[DocumentPart], list[str]]]:
        """Documents cut into parts and packed for the workers, without those of white space."""
        labels: list[DocumentPart] = []
        texts: list[str] = []
        size = 0
        for document in self._documents(start):
            if not document.text.strip():
                continue
            parts = encoder.pieces(document.text, PIECE)
            for number, part in enumerate(parts, start=1):
                labels.append(DocumentPart(document, number == len(parts)))
                texts.append(part)
                size += len(part)
                if size >= PARCEL:
                    yield labels, texts
                    labels, texts, size = [], [], 0
        if labels:
            yield labels, texts

    def _write(self) -> None:
        path, request, journal = self.out / TOKENIZER, self.request, self.journal
        tokenizer = load_file(path)
        if journal.tokenizer_hash not in (None, tokenizer_hash(tokenizer)):
            raise AmorError(f"{path} is not the tokenizer this preparation began with; {AGAIN}")
        vocab, end = vocabulary(tokenizer), end_of_text(tokenizer, request.end_of_text)
        dtype = dtype_for(vocab)
        self.writers = {
            split: ShardWriter(self.out / split, vocab, request.shard_tokens, written)
            for split, written in journal.written.items()
        }
        parcels = self._parcels(journal.next, Encoder(tokenizer, dtype))
        try:
            with Progress(f"preparing {self.out}", self.bytes, "B") as progress:
                for labels, ids in encoded(parcels, path, dtype, self.workers):
                    self._append(labels, ids, end)
                    tokens = sum(written.tokens for written in journal.written.values())
                    progress.to(labels[-1].document.bytes_read, f"{tokens:,} tokens")
        finally:
            for writer in self.writers.values():
                writer.close()
        self._finish(vocab, end, tokenizer_hash(tokenizer))

    def _append(self, labels: list[DocumentPart], ids: list[np.ndarray], end: int) -> None:
        """Write the parts; the journal is saved every `save_every` seconds."""
        for part, tokens in zip(labels, ids):
            split, (source, number), text, _ = part.document
            writer = self.writers[split]
            writer.append(tokens)
            if not part.last:
                continue
            writer.append(np.array([end], dtype=writer.dtype))
            writer.count(self.sources[source][1].name, len(text.encode()))
            self.journal = msgspec.structs.replace(self.journal, next=Place(source, number + 1))
            if time.monotonic() - self._saved >= self.save_every:
                for writer in self.writers.values():
                    writer.sync()
                self._save()
                self._saved = time.monotonic()

    def _finish(self, vocab: int, end: int, tokenizer: str) -> None:
        for split, written in self.journal.written.items():
            if not written.documents:
                counts = Counter({name: w.documents for name, w in self.journal.written.items()})
                raise AmorError(self._why_empty(split, counts))
            self.writers[split].finish()
        for split, written in self.journal.written.items():
            manifest = Manifest(
                dtype=dtype_for(vocab),
                vocab=vocab,
                tokenizer_hash=tokenizer,
                end_of_text=end,
                tokens=written.tokens,
                documents=written.documents,
                text_bytes=written.text_bytes,
                shard_tokens=self.request.shard_tokens,
                shards=tuple(written.shards),
                sources=tuple(Origin(name, count) for name, count in written.by_source.items()),
            )
            write_whole(self.out / split / MANIFEST, typed.text(manifest))
        self.journal = msgspec.structs.replace(self.journal, done=True)
        self._save()

    def _why_empty(self, split: Split, documents: Counter[Split]) -> str:
        if documents.total() and self.request.valid:
            share = f"none of the {documents.total():,} documents fell into {split} with --valid"
            texts = any(source.one_document for _, source in self.sources)
            cut = r"--separator '\n\n' to cut .txt files into documents" if texts else ""
            hint = ", ".join(filter(None, (cut, "--valid-files FILE", "another --valid")))
            return f"{share} {self.request.valid}; add {hint}"
        names = ", ".join(s.name for kind, s in self.sources if kind == split)
        return f"no document with text for {split} in {names}; give inputs that hold text"


def prepare(
    request: Request, out: str | Path, workers: int | None = None, overwrite: bool = False
) -> dict[Split, Shards]:
    """Write (or continue, or open) the shards of a request: split name -> opened shards."""
    return Preparation(request, out, workers).run(overwrite)
