"""The checkpoints of a run: which one to resume from, which to keep, which is the best.

A checkpoint is renamed before it is deleted, so that a kill never leaves half of one under its
name.
"""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from amor.run import Run
from amor.train.checkpoint import (
    WRITING,
    listed,
    point,
    problem_with,
    read_training,
    refuse_old_form,
    step_of,
)
from amor.train.recipe import CheckpointPolicy

DELETING, DAMAGED = ".old-", "damaged-"  # prefixes


def newest_good(run: Run, report: Callable[[str], None]) -> Path | None:
    """The newest checkpoint whose every byte is right.

    A damaged one is reported and renamed, never used and never deleted.
    """
    for folder in reversed(listed(run)):
        refuse_old_form(folder)
        problem = problem_with(folder)
        if problem is None:
            point(run, "latest", folder)
            return folder
        aside = folder.with_name(f"{DAMAGED}{folder.name}")
        shutil.rmtree(aside, ignore_errors=True)
        os.rename(folder, aside)
        report(
            f"checkpoint {folder.name} is damaged: {problem}; set aside as {aside.name}, "
            "going back to the one before"
        )
    return None


def sweep(run: Run) -> None:
    """Remove what a kill left half written or half deleted."""
    for prefix in (WRITING, DELETING):
        for folder in run.checkpoints.glob(f"{prefix}*"):
            shutil.rmtree(folder)


def prune(run: Run, policy: CheckpointPolicy) -> None:
    """Delete the checkpoints that the policy does not keep, and point RUN/best at the best."""
    known = listed(run)
    best = best_of(known)
    keep = set(known[-policy.keep_last :])
    if policy.keep_every:
        keep |= {p for p in known if step_of(p) % policy.keep_every == 0}
    if best is not None and policy.keep_best:
        keep.add(best)
        point(run, "best", best)
    for folder in known:
        if folder not in keep:
            old = folder.with_name(f"{DELETING}{folder.name}")
            os.rename(folder, old)
            shutil.rmtree(old)


def best_of(known: list[Path]) -> Path | None:
    """The checkpoint with the lowest validation nll at its own step, the earlier one of equals."""
    scores = [(valid.nll, p) for p in known if (valid := read_training(p).valid)]
    finite = [(nll, p) for nll, p in scores if nll is not None]
    return min(finite, key=lambda pair: pair[0])[1] if finite else None
