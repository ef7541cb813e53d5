"""HTML pages, each one file with nothing to fetch, by one template (templates/page.html); and JSON
beside them.

All pages have one style and one palette, legible on light and dark screens, wide and narrow. A page
begins with its conclusion in words, then tiles of one number each, then sections.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from amor import typed
from amor.files import disk_errors, replace_file
from amor.records.trace import Trace, Traces
from amor.records.value import Choosing, Value
from amor.study import figures
from amor.study.figures.canvas import BLOCKS
from amor.study.table import Cell, Table, as_cell, one_line, remarks

if TYPE_CHECKING:
    from jinja2 import Environment

TEMPLATES = Path(__file__).with_name("templates")


@dataclass(frozen=True)
class Drawing:
    """An <svg> element with what stands above it."""

    svg: str
    title: str = ""
    caption: str = ""


def draw(figure: str, data: Any, title: str = "", caption: str = "") -> Drawing:
    """The figure of a name, drawn for a page."""
    return Drawing(figures.inline(figures.draw(figure, data)), title, caption)


@dataclass(frozen=True)
class Details:
    """A table or a preformatted text below a heading that opens."""

    title: str
    table: Table | None = None
    text: str = ""


@dataclass(frozen=True)
class PageSection:
    """A part of a page; what is empty takes no space."""

    title: str
    notes: tuple[str, ...] = ()
    tables: tuple[Table, ...] = ()
    figures: tuple[Drawing, ...] = ()
    strips: str = ""  # traced texts, as `strips` encodes them; at most one section of a page
    details: tuple[Details, ...] = ()

    @property
    def empty(self) -> bool:
        """Whether it shows nothing, and is left out."""
        return not any((self.notes, self.tables, self.figures, self.strips, self.details))


def render_page(
    title: str,
    subtitle: str,
    conclusion: Sequence[str],
    facts: Mapping[str, str],
    sections: Iterable[PageSection],
    footer: str = "",
) -> str:
    """The HTML of a page.

    conclusion: sentences that stand first; facts: label -> one number, shown as tiles.
    """
    kept = [section for section in sections if not section.empty]
    template = _environment().get_template("page.html")
    words: dict[str, Any] = {"title": title, "subtitle": subtitle, "conclusion": conclusion}
    return template.render(blocks=BLOCKS, facts=facts, sections=kept, footer=footer, **words)


@cache
def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    made = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters["cell"] = _html_cell
    made.filters["remarks"] = lambda table: remarks(table, "bold")
    return made


def _html_cell(cell: Cell | str | None) -> str:
    from markupsafe import Markup, escape

    return Markup(as_cell(cell, "<b>{}</b>".format, lambda text: str(escape(one_line(text)))))


def json_details(title: str, tree: Any) -> Details:
    """Nested data below a heading that opens."""
    return Details(title, text=msgspec.json.format(msgspec.json.encode(tree), indent=2).decode())


def strips(traces: Sequence[Trace]) -> str:
    """Traced texts for a section: the page draws one box per token, with its numbers under the
    pointer."""
    if not traces:
        return ""
    text = typed.line(Traces(traces=tuple(traces))).strip()
    return text.replace("<", "\\u003c")  # no text can end the script


def percents(shares: Iterable[float]) -> str:
    """Shares of several blocks, such as "40 / 38 / 44 %"."""
    return " / ".join(f"{100 * share:.0f}" for share in shares) + " %"


def write_json(path: str | Path, result: Traces | Value | Choosing) -> Path:
    """Write a result beside its page."""
    return put(path, typed.line(result))


def put(path: str | Path, text: str) -> Path:
    """Write a file as a whole, and the folders above it."""
    path = Path(path)
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, text)
    return path
