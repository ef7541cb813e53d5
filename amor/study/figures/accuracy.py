"""Accuracy against firing rate: each model with its gates closed, as they are and open. A model
without gates is a level."""

from amor.errors import AmorError
from amor.study import evals
from amor.study.eval_tables import SuiteRows, level
from amor.study.figures.base import FigureKind
from amor.study.figures.canvas import DASHED, INK, Figure, below, colour, figure, label

# how the gates were run -> marker and name
GATES = {
    "closed": ("v", "gates closed"),
    "model": ("o", "gates of the model"),
    "open": ("^", "gates open"),
}


class AccuracyFigure(FigureKind):
    """One line per model, through the firing rates of its gates."""

    kind = "accuracy"
    suites = ("common-sense", "retrieval", "niah", "longbench")

    @staticmethod
    def draw(suite_rows: SuiteRows) -> Figure:
        """Of tasks that every row has, so that points differ only in the model and its gates."""
        rows = suite_rows.rows
        known = evals.columns(suite_rows.name, rows)
        columns = [c for c in known if c.percent and all(row.score(c) for row in rows)]
        if not columns:
            lack = "no task that every row has, so there is no average to draw"
            raise AmorError(f"{rows[0].file}: {lack}")
        drawing = figure(3.2)
        axes = drawing.subplots()
        names = {r.file.parent: n for r, n in zip(rows, suite_rows.labels) if r.gates == "model"}
        for number, (folder, name) in enumerate(names.items()):
            mine = [row for row in rows if row.file.parent == folder]
            fired = [(row.rate, row) for row in mine if row.rate is not None]
            points = [(rate, *level(row, columns), row.gates) for rate, row in fired]
            points.sort(key=lambda point: point[0])
            if not points:
                height = level(mine[0], columns)[0]
                axes.axhline(height, linestyle=DASHED, label=name, color=colour(number))
                continue
            line = axes.plot(*zip(*(point[:2] for point in points)), label=name)[0]
            line.set_color(colour(number))
            for rate, value, error, gates in points:
                mark = GATES[gates][0]
                axes.errorbar(rate, value, error, color=colour(number), marker=mark, markersize=5)
        for mark, words in GATES.values():
            axes.plot([], [], mark, color=INK, markersize=4.5, label=words)
        axes.set_xlim(-0.04, 1.04)
        name = f"{suite_rows.name}; bars are one standard error"
        label(axes, "firing rate, mean of blocks", f"accuracy, mean of {len(columns)} (%)", name)
        return below(drawing)
