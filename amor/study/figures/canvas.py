"""What all figures share: matplotlib behind its door, one style, colours that everyone can tell apart, and writing the file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from amor.errors import AmorError
from amor.files import disk_errors

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which stay apart for every kind of colour vision; one per block
BLOCKS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
INK, FAINT, PAPER = "#222222", "#9a9a9a", "#ffffff"
# lightness falls evenly, so that a print in grey keeps the order
ENTROPY = ("#ffffff", "#fdf0d5", "#fbd9a0", "#f5b862", "#e6903a", "#c96a1e")
MARKERS = "osv^DPX*"
FORMATS = (".png", ".svg", ".pdf")
NO_METADATA: dict[str, Any] = dict.fromkeys(("Creator", "Date", "Format", "Type"))
STYLE: Any = {
    # outlines in SVG, so that the layout does not depend on the reader's fonts; real fonts in PDF
    "svg.fonttype": "path",
    "pdf.fonttype": 42,
    "svg.hashsalt": "amor",
    "font.size": 8,
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK),
    "axes.titlesize": 8,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": FAINT,
    "grid.linewidth": 0.3,
    "grid.alpha": 0.4,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "lines.linewidth": 1.2,
    "lines.markersize": 3,
    "legend.frameon": False,
    "legend.fontsize": 6.5,
}


@contextmanager
def style() -> Iterator[None]:
    """While figures are drawn and saved: the style of all of them, which changes nothing outside."""
    try:
        import matplotlib
    except ImportError as error:
        raise AmorError('figures need matplotlib: pip install "matplotlib>=3.9"') from error
    with matplotlib.rc_context(STYLE):
        yield


def figure(width: float, height: float) -> Figure:
    """An empty figure, in inches, that belongs to no window."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), facecolor=PAPER)


def beside(axes: Any) -> None:
    """The legend to the right of the axes, where it covers nothing."""
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0))


def write(drawing: Figure, path: str | Path) -> Path:
    """Save by the file's ending; the same figure gives the same bytes."""
    path = Path(path)
    if path.suffix not in FORMATS:
        raise AmorError(f"{path}: a figure is one of {', '.join(FORMATS)}")
    undated = {".png": {}, ".svg": {"Date": None}, ".pdf": {"CreationDate": None}}[path.suffix]
    with disk_errors(path), style():
        path.parent.mkdir(parents=True, exist_ok=True)
        drawing.savefig(path, dpi=300, metadata=undated)
    return path
