"""Runs side by side: held-out loss against tokens and against time, and how often each gate fired
on the way."""

from typing import Any

from amor.study.figures.base import FigureKind
from amor.study.figures.canvas import Figure, below, colour, figure, label, panels
from amor.study.runs import RunSummary, running_mean

SMOOTH = 20  # steps a firing rate is averaged over


class RunsFigure(FigureKind):
    """Two panels of losses, and one of firing rates where a run has gates."""

    kind = "runs"

    @staticmethod
    def draw(rows: list[RunSummary]) -> Figure:
        """Panels below each other."""
        gated = [row for row in rows if row.firing]
        drawing = figure(6.0 if gated else 4.2)
        by_tokens, by_time, *fires = panels(drawing, 3 if gated else 2)
        for number, row in enumerate(rows):
            style: dict[str, Any] = {"color": colour(number), "marker": "o", "markersize": 2}
            nll = [point.nll for point in row.curve]
            by_tokens.plot([p.tokens / 1e6 for p in row.curve], nll, label=row.run, **style)
            by_time.plot([point.minutes for point in row.curve], nll, **style)
        for row in gated:
            for block in range(len(row.firing[0].fire)):
                rates = running_mean([point.fire[block] for point in row.firing], SMOOTH)
                name = f"block {block}" if len(gated) == 1 else f"{row.run}, block {block}"
                tokens = [point.tokens / 1e6 for point in row.firing]
                fires[0].plot(tokens, rates, color=colour(block + 3), linewidth=1.0, label=name)
        label(by_tokens, "million tokens", "held-out loss (nats)")
        label(by_time, "minutes in steps", "held-out loss (nats)")
        for panel in fires:
            panel.set_ylim(0, 1)
            label(panel, "million tokens", "firing rate")
        return below(drawing)
