"""The six sets of long texts of length extrapolation: the data set of each, and the local file that
may replace it.

FOLDER/lengths_<set>.jsonl (also .gz), one {"text": ...} per line, is the set itself.
"""

import msgspec

from amor.eval.rows import HubSource, Substitute
from amor.eval.task_specs import TextSet


class TextRow(msgspec.Struct, frozen=True):
    """A line of lengths_<set>.jsonl, and of a file of books."""

    text: str


class CodeRow(msgspec.Struct, frozen=True):
    """A source file."""

    text: str = msgspec.field(name="content")


class ReportRow(msgspec.Struct, frozen=True):
    """A government report."""

    text: str = msgspec.field(name="input")


class MeetingTurn(msgspec.Struct, frozen=True):
    """One contribution to a meeting."""

    speaker: str
    content: str


class MeetingRow(msgspec.Struct, frozen=True):
    """The transcript of a meeting."""

    meeting_transcripts: tuple[MeetingTurn, ...]

    @property
    def text(self) -> str:
        """A line per turn."""
        return "\n".join(f"{turn.speaker}: {turn.content}" for turn in self.meeting_transcripts)


class PaperSection(msgspec.Struct, frozen=True):
    """A section of a paper."""

    section_name: str | None
    paragraphs: tuple[str, ...]


class PaperTextRow(msgspec.Struct, frozen=True):
    """A scientific paper."""

    title: str
    abstract: str
    full_text: tuple[PaperSection, ...]

    @property
    def text(self) -> str:
        """Title, abstract, headings and paragraphs."""
        parts = [self.title, self.abstract]
        for section in self.full_text:
            parts += [section.section_name or "", *section.paragraphs]
        return "\n\n".join(filter(None, parts))


def _longbench(name: str) -> HubSource:
    return HubSource("Xnhyacinth/LongBench", name, "test", "context")


# name -> data set, and local substitute
SETS: dict[str, tuple[HubSource, Substitute | None]] = {
    "gov_report": (
        _longbench("gov_report"),
        Substitute("long/leval_gov_report.jsonl.gz", ReportRow, "reports of L-Eval"),
    ),
    "qmsum": (
        _longbench("qmsum"),
        Substitute("long/qmsum_test.jsonl.gz", MeetingRow, "transcripts of QMSum's test meetings"),
    ),
    "narrativeqa": (_longbench("narrativeqa"), None),
    "qasper": (
        _longbench("qasper"),
        Substitute(
            "long/qasper_yesno_papers.jsonl.gz", PaperTextRow, "papers with yes/no questions"
        ),
    ),
    "codeparrot": (
        HubSource("codeparrot/codeparrot-clean-valid", None, "train", "content"),
        Substitute("train/python_code_valid.jsonl.gz", CodeRow, "Python files of eight packages"),
    ),
    "pg19": (
        HubSource("emozilla/pg19", None, "test", "text"),
        Substitute("train/classics_test.jsonl.gz", TextRow, "classic English books"),
    ),
}
TASKS = tuple(
    TextSet(name=name, suite="length-extrapolation", hub=hub, substitute=substitute, place=place)
    for place, (name, (hub, substitute)) in enumerate(SETS.items())
)
