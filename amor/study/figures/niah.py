"""Needles found, a heat map per model: tasks down, lengths across, percent in the cells; what was
not measured is empty."""

from typing import Any

from amor.errors import AmorError
from amor.study import evals
from amor.study.eval_tables import SuiteRows
from amor.study.evals import SuiteResult
from amor.study.figures.base import FigureKind
from amor.study.figures.canvas import FAINT, INK, Axes, Figure, figure, heat, label, panels

Percentages = dict[tuple[str, int], float]  # (task, length) -> share of needles


class NiahFigure(FigureKind):
    """One panel per model."""

    kind = "niah"
    suites = ("niah",)

    @staticmethod
    def draw(suite_rows: SuiteRows) -> Figure:
        """Panels below each other."""
        rows = suite_rows.rows
        scores = [_scores(suite_rows.name, row) for row in rows]
        tasks = list(dict.fromkeys(task for each in scores for task, _ in each))
        lengths = sorted({length for each in scores for _, length in each})
        if not tasks:
            raise AmorError(f"{rows[0].file}: results hold no niah task to draw")
        drawing = figure(len(rows) * (0.3 * len(tasks) + 0.7))
        short = [task.replace("niah_single_", "S-NIAH-") for task in tasks]
        names = [task.replace("niah_stock_", "stock ") for task in short]
        for panel, model, shares in zip(panels(drawing, len(rows)), suite_rows.labels, scores):
            _draw_grid(panel, shares, tasks, lengths)
            panel.set_yticks(range(len(tasks)), names)
            label(panel, "length (tokens, at most)", "task", f"{model}: needles found (%)")
        drawing.tight_layout()
        return drawing


def _scores(suite: str, row: SuiteResult) -> Percentages:
    known = {(c.task, int(c.metric)): row.score(c) for c in evals.columns(suite, [row])}
    return {key: score[0] for key, score in known.items() if score is not None}


def _draw_grid(panel: Axes, shares: Percentages, tasks: list[str], lengths: list[int]) -> None:
    from matplotlib.patches import Rectangle

    for y, task in enumerate(tasks):
        for x, length in enumerate(lengths):
            share = shares.get((task, length))
            fill = FAINT if share is None else heat(share)
            cell: dict[str, Any] = {"facecolor": fill, "edgecolor": FAINT, "linewidth": 0.4}
            panel.add_patch(Rectangle((x - 0.48, y - 0.48), 0.96, 0.96, **cell))
            if share is not None:
                panel.text(x, y, f"{100 * share:.0f}", ha="center", va="center", color=INK)
    panel.set_xlim(-0.5, len(lengths) - 0.5)
    panel.set_ylim(len(tasks) - 0.5, -0.5)
    names = [f"{n // 1024}K" if n % 1024 == 0 else str(n) for n in lengths]
    panel.set_xticks(range(len(lengths)), names)
    panel.tick_params(length=0, labelsize=7)
    panel.spines[:].set_visible(False)
    panel.grid(visible=False)
