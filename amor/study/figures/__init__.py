"""Figures. Matplotlib is imported here and nowhere else; one file per figure, found by the
registry.

A file amor/study/figures/<name>.py defines one class with that name as its `kind` (base.py is the
contract).
"""

import io
from typing import Any, cast

from amor import registry
from amor.errors import AmorError, nearest
from amor.study.figures import canvas
from amor.study.figures.base import FigureKind
from amor.study.figures.canvas import Figure
from amor.study.figures.canvas import write as save

__all__ = ["draw", "inline", "save", "study_figure", "suite_figures"]


def draw(name: str, data: Any) -> Figure:
    """The figure of a name, from the data it draws; "package.module.Class" is one outside the
    package."""
    with canvas.style():
        return _find(name).draw(data)


def inline(drawing: Figure) -> str:
    """An <svg> element to stand in a page, whose colours (templates/page.html) and background it
    takes."""
    file = io.StringIO()
    with canvas.style():
        drawing.savefig(file, format="svg", transparent=True, metadata=canvas.NO_METADATA)
    text = file.getvalue()
    text = text[text.index("<svg") :].replace(canvas.INK, "currentColor")
    for number, colour in enumerate(canvas.BLOCKS):
        text = text.replace(colour.lower(), f"var(--c{number})")
    return text


def study_figure(name: str) -> type[FigureKind]:
    """A figure of studies by its name in a study's `figures`."""
    if "." in name:
        return _find(name)
    known = {kind: figure for kind, figure in _all().items() if figure.needs}
    if name not in known:
        raise AmorError(f"figures: no figure {name!r}; {nearest(name, known)}")
    return known[name]


def suite_figures() -> dict[str, tuple[str, ...]]:
    """Name -> evaluation suites, of the figures that are drawn from evaluations."""
    return {kind: figure.suites for kind, figure in _all().items() if figure.suites}


def _all() -> dict[str, type[FigureKind]]:
    return {kind: _find(kind) for kind in registry.kinds("study.figures")}


def _find(name: str) -> type[FigureKind]:
    return cast(type[FigureKind], registry.find("study.figures", name, "draw"))
