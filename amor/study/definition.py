"""A study as data, and what its folder holds: which runs, what is measured of them, and each
measurement.

A study is a TOML file (`Study`). STUDY/study.json is the same with the list of its runs
(`StudyLedger`); every measurement of a run is a file of its own, RUN/judged/<kind>.json
(`Measurement`), whose kinds are the files of amor/measures.
"""

import math
from collections import Counter
from typing import Annotated, Any, cast

from msgspec import Meta, field

from amor import registry, typed
from amor.checks import Seed
from amor.errors import AmorError, nearest
from amor.measures.base import MeasureKind
from amor.records import Amount, Label, Record, Steps, Words

LEDGER, JUDGED = "study.json", "judged"  # a file of a study, and a folder of a run
MOST_RUNS = 4096  # of one study, seeds and learning rates included
Peak = Annotated[float, Meta(gt=0, le=1e3)]
Values = Annotated[tuple[Any, ...], Meta(min_length=1, max_length=256)]


def find_measure(kind: str) -> type[MeasureKind]:
    """The measurement of a kind; "package.module.Class" is one outside the package."""
    if "." not in kind and kind not in registry.kinds("measures"):
        raise AmorError(f"judge: no key {kind!r}; {nearest(kind, registry.kinds('measures'))}")
    measure = cast(type[MeasureKind], registry.find("measures", kind, "measure"))
    if measure.kind != kind:
        right = "outside the package it is the dotted path of the class"
        raise AmorError(f"judge: {kind}: its kind is {measure.kind!r}; {right}")
    return measure


class StudyRow(Record, frozen=True):
    """One row of the tables: a recipe or a model of the study's recipe, and keys of it to
    change."""

    name: Label
    recipe: Label | None = None
    model: Label | None = None  # short for model.name
    set: dict[Label, Any] = field(default_factory=dict)


class Study(typed.File, frozen=True):
    """What is run and what is shown of it."""

    title: Words
    runs: Annotated[tuple[StudyRow, ...], Meta(min_length=1, max_length=MOST_RUNS)]
    recipe: Label = "tiny/base"
    # keys of every recipe, as `amor train --set`
    set: dict[Label, Any] = field(default_factory=dict)
    axes: dict[Label, Values] = field(default_factory=dict)  # every run with each of these
    # lr.peak of each is tried; the best on validation is shown
    lr: Annotated[tuple[Peak, ...], Meta(max_length=64)] = ()
    seeds: Annotated[tuple[Seed, ...], Meta(min_length=1, max_length=256)] = (1,)
    # of every run: bits depend on them, so they are no matter of the machine
    threads: Annotated[int, Meta(ge=1, le=1024)] = 1
    # kind -> options of its measurement; None: it is not measured
    judge: dict[Label, dict[str, Any] | None] = field(
        default_factory=lambda: {"size": {}, "loss": {}}
    )
    baseline: Label | None = None  # the row whose loss the others are compared with
    paper: bool = False  # the paper's own rows below ours
    # names in amor/study/tables, or of measurements
    tables: Annotated[tuple[Label, ...], Meta(min_length=1)] = ("models",)
    figures: tuple[Label, ...] = ()  # names in amor/study/figures

    def __post_init__(self) -> None:
        names = [run.name for run in self.runs]
        unique = {"names of runs": names, "seeds": self.seeds, "lr": self.lr, "tables": self.tables}
        for what, values in unique.items():
            if twice := [value for value, count in Counter(values).items() if count > 1]:
                raise ValueError(f"{what}: {twice[0]!r} stands there twice")
        if self.baseline is not None and self.baseline not in names:
            raise ValueError(f"baseline: no run {self.baseline!r}; there are {', '.join(names)}")
        measured = self.measurements()
        for name, shown in self._shown().items():
            shown.check(self)
            if shown.needs and not shown.needs & measured.keys():
                kinds = " or judge.".join(sorted(shown.needs))
                raise ValueError(f"{name} is made of judge.{kinds}, which is not asked for")

    def measurements(self, gated: bool = True) -> dict[str, Record]:
        """Kind -> options of what is measured of a model with gated blocks or without."""
        return {
            kind: typed.convert(find_measure(kind).Options, tree, f"judge.{kind}")
            for kind, tree in self.judge.items()
            if tree is not None and (gated or not find_measure(kind).needs_gates)
        }

    def _shown(self) -> dict[str, Any]:
        """Name -> the table or figure."""
        from amor.study.figures import study_figure
        from amor.study.tables import find_table

        figures = {name: study_figure(name) for name in self.figures}
        return figures | {name: find_table(name) for name in self.tables}


class PlannedRun(Record, frozen=True):
    """One run: which row it belongs to, and where it lies in the folder of the study."""

    row: Label
    folder: Label
    seed: Seed
    lr: Peak | None  # where several are tried
    recipe: Label
    changes: tuple[Words, ...]  # KEY=VALUE, as `amor train --set` takes them
    steps: Steps


class StudyLedger(typed.File, frozen=True):
    """STUDY/study.json: a study as it is run."""

    name: Label
    study: Study
    data: Words
    runs: tuple[PlannedRun, ...]

    def __post_init__(self) -> None:
        points = math.prod(map(len, self.study.axes.values()))
        rows, expected = len(self.rows), len(self.study.runs) * points
        if rows != expected:
            raise ValueError(
                f"runs: of {rows} rows, where the study has {expected}: one per run and point of "
                "the axes"
            )

    @property
    def rows(self) -> tuple[str, ...]:
        """Names of the rows, in the order of the study."""
        return tuple(dict.fromkeys(run.row for run in self.runs))


class Measurement(typed.File, frozen=True):
    """RUN/judged/<kind>.json."""

    kind: Label
    # of everything that it depends on: the model, the text, the options, threads
    fingerprint: Label
    seconds: Amount  # that it took
    result: dict[str, Any] = field(name="found")  # the Result of the kind
