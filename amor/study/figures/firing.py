"""Firing rate against position: a panel per model and set of texts, a line per block."""

from amor.errors import AmorError
from amor.study.eval_tables import SuiteRows
from amor.study.figures.base import FigureKind
from amor.study.figures.canvas import Figure, below, colour, figure, label, panels


class FiringFigure(FigureKind):
    """Of the models that have gated blocks."""

    kind = "firing"
    suites = ("length-extrapolation",)

    @staticmethod
    def draw(suite_rows: SuiteRows) -> Figure:
        """Panels two across, those of one model together."""
        curves = {
            f"{model}\n{name}": curve
            for model, row in zip(suite_rows.labels, suite_rows.rows)
            for name, curve in row.evaluation.amor.curves.items()
            if any(curve.rates)
        }
        if not curves:
            lack = "amor.curves has no firing rates; of models without gated blocks there are none"
            raise AmorError(f"{suite_rows.rows[0].file}: {lack}")
        drawing = figure(1.6 * -(-len(curves) // 2) + 0.5)
        each = panels(drawing, len(curves), min(len(curves), 2), sharex=True, sharey=True)
        for panel, (title, curve) in zip(each, curves.items()):
            positions = [length / 1024 for length in curve.lengths]
            for block, rates in enumerate(zip(*curve.rates)):
                name = f"block {block}"
                panel.plot(positions, rates, "o-", color=colour(block), markersize=2, label=name)
            panel.set_ylim(0, 1)
            panel.xaxis.set_major_formatter("{x:g}K")
            label(panel, "position (tokens)", "firing rate", title)
            panel.label_outer()
        return below(drawing, columns=4)
