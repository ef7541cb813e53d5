"""The contract of a measurement, and the options that several of them share.

A file amor/measures/<kind>.py defines one class with that `kind`. Nothing at its top level imports
torch: studies read results and print tables without it, and `measure` imports what it needs. A
measurement of one's own lives anywhere and is named by its dotted path, which is its `kind`, in a
study: judge."package.module.Class" = {}.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import msgspec
from msgspec import Meta

from amor import typed
from amor.checks import Context
from amor.records import Record

if TYPE_CHECKING:
    from amor.experiment.subject import FinishedRun
    from amor.study.results import Results
    from amor.study.table import Table
    from amor.train.recipe import Recipe

# errors come from the windows, so one is too few
WindowCount = Annotated[int, Meta(ge=2, le=2**20)]
Rates = Annotated[tuple[typed.Share, ...], Meta(min_length=1, max_length=64)]  # firing rates
# 0.44 and 0.22 are rates the paper reports; below them gates differ most
RATES = (0.05, 0.1, 0.22, 0.44)


class NoOptions(Record, frozen=True):
    """Nothing to choose."""


class TextOptions(Record, frozen=True):
    """Windows of the held-out split, spread evenly over it: the same ones for every run of a
    context."""

    # a standard error of about a hundredth of a nat on the texts of docs/log.md
    windows: WindowCount = 64
    context: Context | None = None  # tokens per window; None: as the run was trained


class MeasureKind:
    """What is measured of a run, what the result is, and the table a study makes of it."""

    # its key in [judge] of a study, and the name of its file, RUN/judged/<kind>.json
    kind: ClassVar[str]
    Options: ClassVar[type[Record]] = NoOptions  # what a study may choose: judge.<kind> = {...}
    Result: ClassVar[type[msgspec.Struct]]  # what `measure` returns and the file holds
    # raised when the same run gives other numbers, which makes earlier files stale
    version: ClassVar[int] = 1
    needs_gates: ClassVar[bool] = False  # only models with gated blocks are measured
    # the result depends on the held-out text, not on the model alone
    needs_text: ClassVar[bool] = False
    # it is timed: measured at the end, with nothing of the study beside it
    quiet_machine: ClassVar[bool] = False
    table_name: ClassVar[str] = ""  # its table in `tables` of a study; "": named as the kind

    @staticmethod
    def measure(subject: FinishedRun, options: Any) -> Any:
        """A Result. subject: the run, whose model, text and metrics are opened when they are
        read."""
        raise NotImplementedError

    @staticmethod
    def table(results: Results) -> Table:
        """The table of all runs of a study. A kind without one is shown in tables of several kinds
        (amor/study/tables)."""
        raise NotImplementedError

    @staticmethod
    def check(options: Any, recipe: Recipe) -> None:
        """Refuse options that a run of this recipe cannot be measured with, before anything is
        trained."""
