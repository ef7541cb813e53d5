"""What all figures share: one style, colours that everyone can tell apart, and writing the file."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from amor.errors import AmorError
from amor.files import disk_errors

# annotations of figures, without importing matplotlib where nothing is drawn
if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
else:
    Axes = Figure = Any

# Okabe and Ito's colours, which stay apart for every kind of colour vision; one per block
BLOCKS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
INK, FAINT, PAPER = "#222222", "#9a9a9a", "#ffffff"
# lightness falls evenly, so that a print in grey keeps the order
ENTROPY = ("#ffffff", "#fdf0d5", "#fbd9a0", "#f5b862", "#e6903a", "#c96a1e")
MARKERS = "osv^DPX*"
DASHED = (0, (4, 2))
FORMATS = (".png", ".svg", ".pdf")
COLUMN = 3.3  # inches: the column of a two-column paper, and a phone's screen at reading size
NO_METADATA: dict[str, Any] = dict.fromkeys(("Creator", "Date", "Format", "Type"))
STYLE: Any = {
    # outlines in SVG, so that the layout does not depend on the reader's fonts; real fonts in PDF
    "svg.fonttype": "path",
    "pdf.fonttype": 42,
    "svg.hashsalt": "amor",
    "font.size": 8,
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor"), INK),
    **dict.fromkeys(("xtick.color", "ytick.color"), INK),
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
    """While figures are drawn and saved: the style of all of them, which changes nothing
    outside."""
    import matplotlib

    with matplotlib.rc_context(STYLE):
        yield


def figure(height: float, width: float = COLUMN) -> Figure:
    """An empty figure, in inches, that belongs to no window."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), facecolor=PAPER)


def colour(number: int) -> str:
    """The colour of a block or a line, by its number."""
    return BLOCKS[number % len(BLOCKS)]


def marker(number: int) -> str:
    """The marker of a line, by its number."""
    return MARKERS[number % len(MARKERS)]


def heat(share: float) -> Any:
    """A colour between white (0) and the darkest of ENTROPY (1)."""
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("entropy", ENTROPY)(share)


def panels(drawing: Figure, count: int, across: int = 1, **options: Any) -> list[Axes]:
    """`count` panels in rows of `across`; the rest of the last row stays empty."""
    down = -(-count // across)
    every = drawing.subplots(down, across, squeeze=False, **options).flatten()
    for spare in islice(every, count, None):
        spare.set_visible(False)
    return list(every[:count])


def label(axes: Axes, x: str, y: str, title: str = "") -> None:
    """The titles of both axes, and that of the panel."""
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    if title:
        axes.set_title(title)


def below(drawing: Figure, columns: int = 2) -> Figure:
    """The figure, laid out, with one legend below all panels, of every label in them once."""
    pairs = (pair for axes in drawing.axes for pair in zip(*axes.get_legend_handles_labels()))
    known = {label: handle for handle, label in pairs}
    rows, across = -(-len(known) // columns), min(len(known), columns)
    if known:
        drawing.legend(known.values(), known.keys(), loc="lower center", ncols=across)
    drawing.tight_layout(rect=(0, (0.14 * rows + 0.1) / drawing.get_figheight(), 1, 1))
    return drawing


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
