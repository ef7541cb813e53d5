"""Runs side by side: held-out loss against tokens and against time, and how often each gate fired
on the way."""

from typing import Any

from amor.study.figures.base import FigureKind
from amor.study.figures.canvas import Figure, colour, figure
from amor.study.runs import RunSummary

SMOOTH = 20  # steps a firing rate is averaged over


class RunsFigure(FigureKind):
    """Two panels of losses, and one of firing rates where a run has gates."""

    kind = "runs"

    @staticmethod
    def draw(rows: list[RunSummary]) -> Figure:
        gated = [row for row in rows if row.firing]
        drawing = figure(7.2 if gated else 5.0, 2.5)
        axes = drawing.subplots(1, 3 if gated else 2)
        for number, row in enumerate(rows):
            style: dict[str, Any] = {"color": colour(number), "marker": "o", "markersize": 2}
            nll = [point.nll for point in row.curve]
            axes[0].plot([point.tokens / 1e6 for point in row.curve], nll, label=row.run, **style)
            axes[1].plot([point.minutes for point in row.curve], nll, **style)
        for row in gated:
            for block in range(len(row.firing[0].fire)):
                rates = [point.fire[block] for point in row.firing]
                smooth = [
                    sum(rates[max(0, i - SMOOTH + 1) : i + 1]) / min(i + 1, SMOOTH)
                    for i in range(len(rates))
                ]
                label = f"block {block}" if len(gated) == 1 else f"{row.run}, block {block}"
                tokens_read = [point.tokens / 1e6 for point in row.firing]
                axes[2].plot(
                    tokens_read, smooth, color=colour(block + 3), linewidth=1.0, label=label
                )
        tokens, loss = "million tokens", "held-out loss (nats per token)"
        names = ((tokens, loss), ("minutes in steps", ""), (tokens, "firing rate"))
        for panel, (x, y) in zip(axes, names):
            panel.set_xlabel(x)
            panel.set_ylabel(y)
        axes[0].legend()
        if gated:
            axes[2].set_ylim(0, 1)
            axes[2].legend()
        drawing.tight_layout(w_pad=1.4)
        return drawing
