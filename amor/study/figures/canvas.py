"""What all figures share: matplotlib behind its door, colours that everyone can tell apart, and writing the file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from amor.errors import AmorError
from amor.files import disk_errors

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which stay apart for every kind of colour vision; one a block
BLOCKS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
INK, FAINT, PAPER = "#222222", "#9a9a9a", "#ffffff"
# lightness falls evenly, so that a print in grey keeps the order
ENTROPY = ("#ffffff", "#fdf0d5", "#fbd9a0", "#f5b862", "#e6903a", "#c96a1e")
FORMATS = (".png", ".svg", ".pdf")


def figure(width: float, height: float) -> Figure:
    """An empty figure, in inches, that belongs to no window."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise AmorError('figures need matplotlib: pip install "amor[demo]"') from error
    # outlines in SVG, so that the layout does not depend on the reader's fonts; real fonts in PDF
    matplotlib.rcParams.update({"svg.fonttype": "path", "pdf.fonttype": 42, "font.size": 8, "svg.hashsalt": "amor"})
    return Figure(figsize=(width, height), facecolor=PAPER)


def write(drawing: Figure, path: str | Path) -> Path:
    """Save by the file's ending; the same figure gives the same bytes."""
    path = Path(path)
    if path.suffix not in FORMATS:
        raise AmorError(f"{path}: a figure is one of {', '.join(FORMATS)}")
    undated = {".png": {}, ".svg": {"Date": None}, ".pdf": {"CreationDate": None}}[path.suffix]
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        drawing.savefig(path, dpi=300, metadata=undated)
    return path
