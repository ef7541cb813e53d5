"""The loss on held-out windows, one number per window: runs are compared window by window."""

from __future__ import annotations

from typing import TYPE_CHECKING

from amor import typed
from amor.errors import AmorError
from amor.measures.base import MeasureKind, TextOptions
from amor.records import Amount, Number, Record
from amor.records.value import TextSource

if TYPE_CHECKING:
    from amor.experiment.subject import FinishedRun
    from amor.study.paired import Grid
    from amor.study.results import Results


class LossResult(Record, frozen=True):
    """Nats per token of every window, which pairs runs, and of all; the error is over windows."""

    nll: Number
    se: Amount
    windows: tuple[Number, ...]
    fire: tuple[typed.Share, ...]  # share of tokens, one per block
    data: TextSource


class LossMeasure(MeasureKind):
    """Held-out loss, window by window."""

    kind = "loss"
    Options, Result = TextOptions, LossResult
    needs_text = True

    @staticmethod
    def measure(subject: FinishedRun, options: TextOptions) -> LossResult:
        """Read the windows once with the model as it is."""
        from amor.judge.loop import join_chunks, run_windows
        from amor.judge.windows import about

        windows = subject.windows(options)
        output = join_chunks(run_windows(subject.model, windows))
        each = output.nll.double().mean(1)
        if not bool(each.isfinite().all()):
            raise AmorError(f"{subject.run.folder}: its losses are not finite on held-out text")
        return LossResult(
            nll=float(each.mean()),
            se=float(each.std() / len(each) ** 0.5),
            windows=tuple(each.tolist()),
            fire=tuple(output.fire.double().mean((1, 2)).tolist()),
            data=about(windows),
        )


def losses(results: Results, row: str) -> Grid | None:
    """Loss by seed and window of one row of a study; None where no run of it is measured."""
    windows = {seed: each.windows for seed, each in results.of(row, "loss").items()}
    return results.grid(row, "loss", windows)
