"""Needles found, a heat map per model: tasks down, lengths across, percent in the cells; what was not asked for is empty."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from amor.errors import AmorError
from amor.study import evals
from amor.study.eval_tables import SuiteRows
from amor.study.evals import SuiteResult
from amor.study.figures.base import FigureKind
from amor.study.figures.canvas import ENTROPY, FAINT, figure
from amor.study.suites import ScoreColumn

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

ACROSS = 3  # panels in a row


class NiahFigure(FigureKind):
    kind = "niah"
    suites = ("niah",)

    @staticmethod
    def draw(suite_rows: SuiteRows) -> Figure:
        columns = [c for c in evals.columns(suite_rows.name, suite_rows.rows) if any(row.score(c) for row in suite_rows.rows)]
        tasks, lengths = list(dict.fromkeys(c.task for c in columns)), sorted({int(c.metric) for c in columns})
        if not tasks:
            raise AmorError(f"{suite_rows.rows[0].file}: results hold no niah task to draw")
        across = min(len(suite_rows.rows), ACROSS)
        down = -(-len(suite_rows.rows) // across)
        drawing = figure(across * (0.5 * len(lengths) + 0.3) + 1.3, down * (0.34 * len(tasks) + 0.75))
        panels = drawing.subplots(down, across, squeeze=False, sharey=True)
        for panel, label, row in zip(panels.flat, suite_rows.labels, suite_rows.rows):
            found = {(c.task, int(c.metric)): c for c in columns}
            grid(panel, row, tasks, lengths, found)
            panel.set_title(label)
        for spare in panels.flat[len(suite_rows.rows) :]:
            spare.set_visible(False)
        for first in panels[:, 0]:
            first.set_yticks(
                range(len(tasks)), [task.replace("niah_single_", "S-NIAH-").replace("niah_stock_", "stock ") for task in tasks]
            )
        drawing.tight_layout()
        return drawing


def grid(
    panel: Axes, row: SuiteResult, tasks: list[str], lengths: list[int], columns: dict[tuple[str, int], ScoreColumn]
) -> None:
    from matplotlib.colors import LinearSegmentedColormap

    shades = LinearSegmentedColormap.from_list("found", ENTROPY)  # white: none; the darkest: all
    for y, task in enumerate(tasks):
        for x, length in enumerate(lengths):
            score = row.score(columns[task, length]) if (task, length) in columns else None
            colour = FAINT if score is None else shades(score[0])
            panel.add_patch(_square(x, y, colour))
            panel.text(x, y, "" if score is None else f"{100 * score[0]:.0f}", ha="center", va="center", fontsize=7)
    panel.set_xlim(-0.5, len(lengths) - 0.5)
    panel.set_ylim(len(tasks) - 0.5, -0.5)
    panel.set_xticks(range(len(lengths)), [f"{n // 1024}K" if n % 1024 == 0 else f"{n}" for n in lengths])
    panel.tick_params(length=0, labelsize=7)
    panel.spines[:].set_visible(False)
    panel.grid(visible=False)
    panel.set_xlabel("tokens, at most")


def _square(x: int, y: int, colour: Any) -> Patch:
    from matplotlib.patches import Rectangle

    return Rectangle((x - 0.48, y - 0.48), 0.96, 0.96, facecolor=colour, edgecolor=FAINT, linewidth=0.4)
