"""The documents of the sets of long texts (tasks/long_texts.py): from local files, from
substitutes, or streamed from the hub.

A set that is not there is skipped by name, with the command that supplies it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from amor import typed
from amor.data.shards import sha256_of
from amor.data.sources import DocumentSource, Reading, rows, text_of
from amor.errors import AmorError, nearest
from amor.eval import tasks
from amor.eval.lengths import Segment
from amor.eval.rows import MissingDataError
from amor.eval.task_specs import TextSet
from amor.eval.tasks.long_texts import TextRow
from amor.records.evals import Data


@dataclass(frozen=True)
class TextDocuments:
    """The documents of one set, each once, read when they are iterated."""

    source: str  # where they are from, for people
    read: Callable[[], Iterator[str]]
    sha256: str = ""

    def __iter__(self) -> Iterator[str]:
        """Each text once: sets made for questions repeat a document with every question."""
        digests: set[bytes] = set()
        for text in self.read():
            digest = hashlib.sha256(text.encode()).digest()
            if digest not in digests:
                digests.add(digest)
                yield text

    def data(self, segments: Sequence[Segment]) -> Data:
        """The set as results describe it."""
        joined = sum(one.documents > 1 for one in segments)
        note = f"; short documents joined in {joined} of {len(segments)} segments" if joined else ""
        return Data(source=self.source + note, sha256=self.sha256, rows=len(segments))


def find(
    folder: Path | None, names: Iterable[str] | None = None
) -> tuple[dict[str, TextDocuments], dict[str, str]]:
    """The sets that are there, and why others are skipped; folder None: the hub."""
    if folder is not None and not folder.is_dir():
        advice = "give one that holds lengths_<set>.jsonl, or leave out --data to read the hub's"
        raise AmorError(f"no folder {folder}; {advice} sets")
    documents: dict[str, TextDocuments] = {}
    skipped: dict[str, str] = {}
    sets = tasks.in_suite(tasks.LENGTHS)
    for name in sets if names is None else names:
        if name not in sets:
            raise AmorError(f"no set {name!r} of long texts; {nearest(name, sets)}")
        spec = sets[name]
        assert isinstance(spec, TextSet)
        try:
            documents[name] = from_hub(spec) if folder is None else in_folder(spec, folder)
        except MissingDataError as error:
            skipped[name] = str(error)
    return documents, skipped


def in_folder(spec: TextSet, folder: Path) -> TextDocuments:
    """The set, or its substitute, among local files."""
    own = [folder / f"lengths_{spec.name}.jsonl", folder / f"lengths_{spec.name}.jsonl.gz"]
    for path in own:
        if path.is_file():
            return TextDocuments(str(path), partial(lines, path, TextRow), sha256_of(path))
    other = spec.substitute
    if other is not None and (path := folder / other.file).is_file():
        return TextDocuments(other.source(path), partial(lines, path, other.row), sha256_of(path))
    lack = f"there is neither {own[0]} nor {'a stand-in for it' if other is None else other.file}"
    raise MissingDataError(f"{lack}; where the hub can be reached: {spec.hub.command(own[0])}")


def lines(path: Path, kind: type) -> Iterator[str]:
    """The texts of a file's rows, which have the type `kind`."""
    for where, row in rows(path):
        yield text_of(typed.convert(kind, row, where).text, Reading(), where)


def from_hub(spec: TextSet) -> TextDocuments:
    """A set of the hub; fetching its first document shows whether the hub can be reached."""
    hub = spec.hub
    source = DocumentSource(
        f"hf:{hub.name}", Reading(field=hub.field, config=hub.config, split=hub.split)
    )
    name = f"{source.name} ({', '.join(filter(None, (hub.config, hub.split)))})"
    texts = TextDocuments(name, lambda: (document.text for document in source.documents()))
    try:
        next(texts.read(), None)
    except AmorError as error:
        path = f"FOLDER/lengths_{spec.name}.jsonl"
        supply = f"which this writes where the hub can be reached: {hub.command(path)}"
        raise MissingDataError(f"{error}; give --data FOLDER with {path}, {supply}") from error
    return texts
