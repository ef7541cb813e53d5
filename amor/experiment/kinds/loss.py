"""The loss on held-out windows, one number a window: runs are compared window by window."""

from amor.errors import AmorError
from amor.experiment.subject import Subject
from amor.judge.loop import join_chunks, run_windows
from amor.judge.windows import about
from amor.records.study import Losses, OnText

VERSION = 1  # raised where it finds other numbers of the same run, which makes those that stand void


def judge(subject: Subject, asked: OnText) -> Losses:
    windows = subject.windows(asked)
    found = join_chunks(run_windows(subject.model, windows))
    each = found.nll.double().mean(1)
    if not bool(each.isfinite().all()):
        raise AmorError(f"{subject.run.folder}: its losses are not finite on held-out text")
    return Losses(
        nll=float(each.mean()),
        se=float(each.std() / len(each) ** 0.5),
        windows=tuple(each.tolist()),
        fire=tuple(found.fire.double().mean((1, 2)).tolist()),
        data=about(windows),
    )
