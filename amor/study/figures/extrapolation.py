"""Perplexity against length, a panel per set of texts and a line per model; a band is one standard
error over segments."""

from amor.study.eval_tables import SuiteRows, text_sets
from amor.study.figures.base import FigureKind
from amor.study.figures.canvas import Axes, Figure, below, colour, figure, label, marker, panels


class ExtrapolationFigure(FigureKind):
    """Whole prefixes, or the last 1,024 tokens before each length."""

    kind = "extrapolation"
    suites = ("length-extrapolation",)

    @staticmethod
    def draw(suite_rows: SuiteRows) -> Figure:
        """A panel per set of texts."""
        sets = text_sets(suite_rows.rows)
        drawing = figure(1.7 * len(sets) + 0.5)
        for name, panel in zip(sets, panels(drawing, len(sets))):
            _draw_set(panel, suite_rows, name)
        return below(drawing)


def _draw_set(panel: Axes, suite_rows: SuiteRows, name: str) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    for number, (model, row) in enumerate(zip(suite_rows.labels, suite_rows.rows)):
        curve, line = row.evaluation.amor.curves.get(name), colour(number)
        x = [length / 1024 for length in curve.lengths] if curve else []
        y = (curve.bucket if suite_rows.bucket else curve.prefix) if curve else ()
        panel.plot(x, y, color=line, marker=marker(number), label=model)
        if curve and not suite_rows.bucket:
            low = [max(value - error, value / 10) for value, error in zip(y, curve.errors)]
            high = [value + error for value, error in zip(y, curve.errors)]
            panel.fill_between(x, low, high, color=line, alpha=0.18, linewidth=0)
    panel.set_yscale("log")
    panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    panel.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    panel.yaxis.set_minor_formatter(NullFormatter())
    panel.xaxis.set_major_formatter(StrMethodFormatter("{x:g}K"))
    last = "perplexity, last 1,024" if suite_rows.bucket else "perplexity of the prefix"
    label(panel, "length (tokens)", last, name)
