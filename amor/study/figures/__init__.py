"""Figures. Matplotlib is imported here and nowhere else; one file a figure, with a `draw`."""

from __future__ import annotations

import importlib
import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

from amor.study.figures import canvas

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw(name: str, found: Any) -> Figure:
    """The figure of a name, from the data it draws."""
    return importlib.import_module(f"amor.study.figures.{name}").draw(found)


def save(drawing: Figure, path: str | Path) -> Path:
    return canvas.write(drawing, path)


def inline(drawing: Figure) -> str:
    """An <svg> element to stand in a page."""
    held = io.StringIO()
    drawing.savefig(held, format="svg", metadata={"Date": None})
    text = held.getvalue()
    return text[text.index("<svg") :]
