"""HTML pages, each one file with nothing to fetch, by the templates of amor/study/templates; and
JSON beside them.

All pages share templates/base.html: one style and one palette, legible on light and dark screens,
wide and narrow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from amor import typed
from amor.files import disk_errors, replace_file
from amor.records.trace import Traces
from amor.records.value import Choosing, Value
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


@dataclass(frozen=True)
class MarkedToken:
    """A token of a text: its CSS classes, and what is shown beside it under the pointer."""

    text: str
    classes: str
    tip: str


@dataclass(frozen=True)
class MarkedText:
    title: str
    tokens: tuple[MarkedToken, ...]


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
    points: tuple[str, ...] = ()  # a list
    notes: tuple[str, ...] = ()
    tables: tuple[Table, ...] = ()
    figures: tuple[Drawing, ...] = ()
    size: str = "many"  # of figures: "many" small ones in a row, "few" larger ones, or "one"
    key: tuple[tuple[str, int], ...] = ()  # name and shade of the colours in texts
    texts: tuple[MarkedText, ...] = ()
    details: tuple[Details, ...] = ()

    @property
    def empty(self) -> bool:
        return not any(
            (self.points, self.notes, self.tables, self.figures, self.texts, self.details)
        )


def render_page(
    title: str,
    subtitle: str,
    sections: Sequence[PageSection],
    facts: Mapping[str, str] | None = None,
    footer: str = "",
) -> str:
    """A page of sections; facts: name -> value, shown as tiles at the top."""
    kept = [section for section in sections if not section.empty]
    return render(
        "page.html", title=title, subtitle=subtitle, facts=facts or {}, sections=kept, footer=footer
    )


def render(template: str, **values: Any) -> str:
    return _environment().get_template(template).render(blocks=BLOCKS, **values)


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
    made.filters["remarks"] = _html_remarks
    return made


def _html_cell(cell: Cell | str | None) -> str:
    from markupsafe import Markup, escape

    return Markup(as_cell(cell, "<b>{}</b>".format, lambda text: str(escape(one_line(text)))))


def _html_remarks(table: Table) -> list[str]:
    return remarks(table, "bold")


def json_details(title: str, tree: Any) -> Details:
    """Nested data below a heading that opens."""
    return Details(title, text=msgspec.json.format(msgspec.json.encode(tree), indent=2).decode())


def trace_page(found: Traces) -> str:
    """Traces with details under the pointer: the data in the page, drawn there."""
    data = typed.line(found).strip().replace("<", "\\u003c")  # no text can end the script
    return render("trace.html", title="Where attention ran", data=data)


def write_json(path: str | Path, found: Traces | Value | Choosing) -> Path:
    return put(path, typed.line(found))


def put(path: str | Path, text: str) -> Path:
    path = Path(path)
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, text)
    return path
