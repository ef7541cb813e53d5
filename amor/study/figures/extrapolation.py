"""Perplexity against length, a panel per set of texts and a line per model; a band is one standard
error over segments."""

from amor.study.eval_tables import SuiteRows, text_sets
from amor.study.figures.base import FigureKind
from amor.study.figures.canvas import Axes, Figure, below, colour, figure, marker, panels

ACROSS = 3  # panels in a row


class ExtrapolationFigure(FigureKind):
    """Whole prefixes, or the last 1,024 tokens before each length."""

    kind = "extrapolation"
    suites = ("length-extrapolation",)

    @staticmethod
    def draw(suite_rows: SuiteRows) -> Figure:
        sets = text_sets(suite_rows.rows)
        across = min(len(sets), ACROSS)
        drawing = figure(max(2.5 * across, 3.6), 2.1 * -(-len(sets) // across) + 0.5)
        for name, panel in zip(sets, panels(drawing, len(sets), across)):
            _draw_set(panel, suite_rows, name)
        below(drawing, columns=3)
        return drawing


def _draw_set(panel: Axes, suite_rows: SuiteRows, name: str) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    for number, (label, row) in enumerate(zip(suite_rows.labels, suite_rows.rows)):
        curve, line = row.evaluation.amor.curves.get(name), colour(number)
        x = [length / 1024 for length in curve.lengths] if curve else []
        y = (curve.bucket if suite_rows.bucket else curve.prefix) if curve else ()
        panel.plot(x, y, color=line, marker=marker(number), label=label)
        if curve and not suite_rows.bucket:
            low = [max(value - error, value / 10) for value, error in zip(y, curve.errors)]
            high = [value + error for value, error in zip(y, curve.errors)]
            panel.fill_between(x, low, high, color=line, alpha=0.18, linewidth=0)
    panel.set_yscale("log")
    panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    panel.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    panel.yaxis.set_minor_formatter(NullFormatter())
    panel.set_title(name)
    panel.xaxis.set_major_formatter(StrMethodFormatter("{x:g}K"))
    panel.set_xlabel("tokens")
    last = "perplexity, last 1,024" if suite_rows.bucket else "perplexity of the prefix"
    panel.set_ylabel(last)
