"""The six sets of long texts that perplexity is measured on against length: local files, stand-ins for them, or the hub's.

With a folder, FOLDER/lengths_<set>.jsonl (also .gz), one {"text": ...} a line, is the set; else a stand-in under a name of its
own, and the results say so. Without a folder a set is streamed from the hub. A set that cannot be had is left out by name, with
what would supply it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec

from amor import typed
from amor.data.shards import sha256_of
from amor.data.sources import Reading, Source, rows, text_of
from amor.errors import AmorError, nearest
from amor.eval.lengths import Segment
from amor.records.evals import Data


class Row(msgspec.Struct, frozen=True):
    """A line of lengths_<set>.jsonl, and of a file of books."""

    text: str


class Code(msgspec.Struct, frozen=True):
    content: str

    @property
    def text(self) -> str:
        return self.content


class Report(msgspec.Struct, frozen=True):
    input: str

    @property
    def text(self) -> str:
        return self.input


class Turn(msgspec.Struct, frozen=True):
    speaker: str
    content: str


class Meeting(msgspec.Struct, frozen=True):
    meeting_transcripts: tuple[Turn, ...]

    @property
    def text(self) -> str:
        return "\n".join(f"{turn.speaker}: {turn.content}" for turn in self.meeting_transcripts)


class Section(msgspec.Struct, frozen=True):
    section_name: str | None
    paragraphs: tuple[str, ...]


class Paper(msgspec.Struct, frozen=True):
    title: str
    abstract: str
    full_text: tuple[Section, ...]

    @property
    def text(self) -> str:
        parts = (part for section in self.full_text for part in (section.section_name, *section.paragraphs))
        return "\n\n".join(part for part in (self.title, self.abstract, *parts) if part)


Kind = type[Row] | type[Code] | type[Report] | type[Meeting] | type[Paper]


@dataclass(frozen=True)
class Hub:
    """Where the hub has a set."""

    name: str
    field: str = "text"
    config: str | None = None
    split: str = "test"

    def command(self, path: Path | str) -> str:
        """What writes the file that is missing, where the hub can be reached."""
        given = ", ".join(map(repr, filter(None, (self.name, self.config))))
        renamed = "" if self.field == "text" else f".rename_column({self.field!r}, 'text')"
        rows = f"load_dataset({given}, split={self.split!r}).select_columns({self.field!r}){renamed}"
        return f'python -c "from datasets import load_dataset; {rows}.to_json({str(path)!r})"'


@dataclass(frozen=True)
class StandIn:
    """A file of the same sort of text, and of what its lines are."""

    file: str
    row: Kind
    words: str


HUB = {
    **{name: Hub("Xnhyacinth/LongBench", "context", name) for name in ("gov_report", "qmsum", "narrativeqa", "qasper")},
    "codeparrot": Hub("codeparrot/codeparrot-clean-valid", "content", split="train"),
    "pg19": Hub("emozilla/pg19"),
}
SETS = tuple(HUB)
STAND_INS = {
    "gov_report": StandIn("long/leval_gov_report.jsonl.gz", Report, "reports of L-Eval"),
    "qmsum": StandIn("long/qmsum_test.jsonl.gz", Meeting, "transcripts of QMSum's test meetings"),
    "qasper": StandIn("long/qasper_yesno_papers.jsonl.gz", Paper, "papers with yes/no questions"),
    "codeparrot": StandIn("train/python_code_valid.jsonl.gz", Code, "Python files of eight packages"),
    "pg19": StandIn("train/classics_test.jsonl.gz", Row, "classic English books"),
}


@dataclass(frozen=True)
class Texts:
    """One set: its documents, each once, read when they are asked for."""

    source: str  # for people
    read: Callable[[], Iterator[str]]
    sha256: str = ""

    def __iter__(self) -> Iterator[str]:
        """Sets made for questions repeat a document with every question."""
        met: set[bytes] = set()
        for text in self.read():
            digest = hashlib.sha256(text.encode()).digest()
            if digest not in met:
                met.add(digest)
                yield text

    def data(self, segments: Sequence[Segment]) -> Data:
        """What to say of it in the results."""
        joined = sum(one.documents > 1 for one in segments)
        said = f"; short documents joined in {joined} of {len(segments)} segments" if joined else ""
        return Data(source=self.source + said, sha256=self.sha256, rows=len(segments))


def find(folder: Path | None, names: Iterable[str] = SETS) -> tuple[dict[str, Texts], dict[str, str]]:
    """The sets that can be had, and of the others why not and what would supply them."""
    found: dict[str, Texts] = {}
    skipped: dict[str, str] = {}
    if folder is not None and not folder.is_dir():
        raise AmorError(
            f"no folder {folder}; give one that holds lengths_<set>.jsonl, or leave out --data to read the hub's sets"
        )
    for name in names:
        if name not in HUB:
            raise AmorError(f"no set {name!r} of long texts; {nearest(name, SETS)}")
        texts = of_hub(name) if folder is None else in_folder(name, folder)
        if isinstance(texts, Texts):
            found[name] = texts
        else:
            skipped[name] = texts
    return found, skipped


def in_folder(name: str, folder: Path) -> Texts | str:
    own = [folder / f"lengths_{name}.jsonl", folder / f"lengths_{name}.jsonl.gz"]
    for path in own:
        if path.is_file():
            return Texts(str(path), partial(lines, path, Row), sha256_of(path))
    other = STAND_INS.get(name)
    if other is not None and (folder / other.file).is_file():
        path = folder / other.file
        return Texts(f"{path} (a stand-in: {other.words})", partial(lines, path, other.row), sha256_of(path))
    wanted = f"{own[0]} nor a stand-in for it" if other is None else f"{own[0]} nor {other.file}"
    return f"there is neither {wanted}; where the hub can be reached: {HUB[name].command(own[0])}"


def lines(path: Path, kind: Kind) -> Iterator[str]:
    for where, held in rows(path):
        yield text_of(typed.convert(kind, held, where).text, Reading(), where)


def of_hub(name: str) -> Texts | str:
    """A set of the hub, its first document fetched: whether it can be reached is known before the work begins."""
    hub = HUB[name]
    source = Source(f"hf:{hub.name}", Reading(field=hub.field, config=hub.config, split=hub.split))
    texts = Texts(
        f"{source.name} ({', '.join(filter(None, (hub.config, hub.split)))})",
        lambda: (found.text for found in source.documents()),
    )
    try:
        next(texts.read(), None)
    except AmorError as error:
        path = f"FOLDER/lengths_{name}.jsonl"
        return f"{error}; give --data FOLDER with {path}, which this writes where the hub can be reached: {hub.command(path)}"
    return texts
