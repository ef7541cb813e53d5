"""A study as data, and what its folder holds: which runs, how they are judged, and what each judgement found.

A study is a TOML file (`Study`). STUDY/study.json is the same with the list of its runs (`Ledger`); every judgement of a run is a
file of its own, RUN/judged/<kind>.json (`Judgement`), whose `found` is one of the records at the end, by kind.
"""

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from msgspec import Meta, field

from amor import typed
from amor.checks import Context, Seed
from amor.records import MOST_BLOCKS, Amount, Number, Part, Steps, Words
from amor.records.recall import Recall
from amor.records.value import Choosing, Text, Value

LEDGER, JUDGED = "study.json", "judged"  # a file of a study, and a folder of a run
GATED = frozenset({"gate", "value", "rates", "choices"})  # asked of models with gates only
MOST_RUNS = 4096  # of one study, seeds and learning rates included
Label = Annotated[str, Meta(min_length=1, max_length=200, pattern=r"\A[^\x00-\x1f\x7f]*\Z")]  # in one line
Peak = Annotated[float, Meta(gt=0, le=1e3)]
Windows = Annotated[int, Meta(ge=2, le=2**20)]  # errors come from the windows, so one is too few
Rounds = Annotated[int, Meta(ge=1, le=10_000)]
Tokens = Annotated[int, Meta(ge=1, le=2**20)]
Values = Annotated[tuple[Any, ...], Meta(min_length=1, max_length=256)]
Rates = Annotated[tuple[typed.Share, ...], Meta(min_length=1, max_length=64)]

TableName = Literal["models", "gates", "value", "rates", "choices", "frontier", "recall", "reach", "sweep"]
FigureName = Literal["losses", "rates", "frontier"]


class OnText(Part, frozen=True):
    """Windows of the held-out split, spread over it: the same ones for every run of a context."""

    windows: Windows = 64
    context: Context | None = None  # None: as the run was trained


class OnSizes(Part, frozen=True):
    """Of shapes alone: nothing is read."""


class OnMetrics(Part, frozen=True):
    """Of what training has written down: nothing is read."""


class OnClock(Part, frozen=True):
    """Decode steps after a beginning of held-out text; rates: with gates that fire as often, and once as they are."""

    rates: Annotated[tuple[typed.Share, ...], Meta(max_length=64)] = ()
    context: Context | None = None  # tokens that stand before the first step; None: as the run was trained
    tokens: Tokens = 64  # steps of a round
    rounds: Rounds = 5


class AtRates(OnText, frozen=True):
    """Policies at equal firing rates."""

    rates: Rates = (0.05, 0.1, 0.22, 0.44)
    draws: Annotated[int, Meta(ge=1, le=1000)] = 2  # random choices that are averaged


class AtChoices(OnText, frozen=True):
    """Other gates in front of the same attention, at equal firing rates."""

    rates: Rates = (0.05, 0.1, 0.22, 0.44)
    learned: Windows = 512  # windows of the training text that gates learn from


class OnTask(Part, frozen=True):
    """Rows of the run's own task, which no training sees."""

    rows: Annotated[int, Meta(ge=1, le=2**20)] = 256
    seed: Seed = 0


class AtSizes(OnTask, frozen=True, kw_only=True):
    """The run's own task with these options changed."""

    at: Annotated[tuple[dict[Label, Any], ...], Meta(min_length=1, max_length=64)]


class Judging(Part, frozen=True):
    """Kind -> what is asked of it; None: it is not judged."""

    size: OnSizes | None = None
    loss: OnText | None = None
    gate: OnMetrics | None = None
    value: OnText | None = None
    rates: AtRates | None = None
    choices: AtChoices | None = None
    recall: OnTask | None = None
    reach: AtSizes | None = None
    speed: OnClock | None = None

    def asked(self, gated: bool = True) -> dict[str, Part]:
        """What is judged of a model with gates or without, in this order."""
        held = {kind: getattr(self, kind) for kind in self.__struct_fields__}
        return {kind: asked for kind, asked in held.items() if asked is not None and (gated or kind not in GATED)}


class Compared(Part, frozen=True):
    """One row of the tables: a recipe or a model of the study's recipe, and keys of it to change."""

    name: Label
    recipe: Label | None = None
    model: Label | None = None  # short for model.name
    set: dict[Label, Any] = field(default_factory=dict)


class Study(typed.File, frozen=True):
    """What is run and what is shown of it."""

    title: Words
    runs: Annotated[tuple[Compared, ...], Meta(min_length=1, max_length=MOST_RUNS)]
    recipe: Label = "tiny/base"
    set: dict[Label, Any] = field(default_factory=dict)  # keys of every recipe, as `amor train --set`
    axes: dict[Label, Values] = field(default_factory=dict)  # every run with each of these
    lr: Annotated[tuple[Peak, ...], Meta(max_length=64)] = ()  # lr.peak of each is tried; the best on validation is shown
    seeds: Annotated[tuple[Seed, ...], Meta(min_length=1, max_length=256)] = (1,)
    threads: Annotated[int, Meta(ge=1, le=1024)] = 1  # of every run: bits depend on them, so they are no matter of the machine
    judge: Judging = Judging(size=OnSizes(), loss=OnText())
    baseline: Label | None = None  # the row whose loss the others are compared with
    paper: bool = False  # the paper's own rows below ours
    tables: Annotated[tuple[TableName, ...], Meta(min_length=1)] = ("models",)
    figures: tuple[FigureName, ...] = ()

    def __post_init__(self) -> None:
        names = [run.name for run in self.runs]
        for what, values in {"names of runs": names, "seeds": self.seeds, "lr": self.lr, "tables": self.tables}.items():
            if twice := _twice(values):
                raise ValueError(f"{what}: {twice!r} stands there twice")
        if self.baseline is not None and self.baseline not in names:
            raise ValueError(f"baseline: no run {self.baseline!r}; there are {', '.join(names)}")
        if "sweep" in self.tables and not self.lr:
            raise ValueError("tables: sweep shows learning rates; give several in lr")
        if {"frontier"} & {*self.tables, *self.figures} and self.judge.loss and self.judge.rates:
            sides = [(asked.windows, asked.context) for asked in (self.judge.loss, self.judge.rates)]
            if sides[0] != sides[1]:
                raise ValueError("frontier sets judge.loss and judge.rates side by side: give both the same windows and context")
        for table, kinds in NEEDS.items():
            if table in (*self.tables, *self.figures) and not kinds & self.judge.asked().keys():
                raise ValueError(f"{table} is made of judge.{' or judge.'.join(sorted(kinds))}, which is not asked for")


# what tables and figures are made of
NEEDS: Mapping[str, frozenset[str]] = {
    "models": frozenset({"loss"}),
    "gates": frozenset({"gate"}),
    "value": frozenset({"value"}),
    "rates": frozenset({"rates"}),
    "choices": frozenset({"choices"}),
    "frontier": frozenset({"rates"}),
    "losses": frozenset({"loss"}),
    "recall": frozenset({"recall"}),
    "reach": frozenset({"reach"}),
}


def _twice(values: Iterable[Any]) -> Any:
    seen: set[Any] = set()
    return next((value for value in values if value in seen or seen.add(value)), None)  # type: ignore[func-returns-value]


class Planned(Part, frozen=True):
    """One run: which row it belongs to, and where it lies in the folder of the study."""

    row: Label
    folder: Label
    seed: Seed
    lr: Peak | None  # where several are tried
    recipe: Label
    changes: tuple[Words, ...]  # KEY=VALUE, as `amor train --set` takes them
    steps: Steps


class Ledger(typed.File, frozen=True):
    """STUDY/study.json: a study as it is run."""

    name: Label
    study: Study
    data: Words
    runs: tuple[Planned, ...]

    @property
    def rows(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(run.row for run in self.runs))


class Judgement(typed.File, frozen=True):
    """RUN/judged/<kind>.json."""

    kind: Label
    fingerprint: Label  # of everything that it depends on: the model, the text, what was asked, threads
    seconds: Amount
    found: dict[str, Any]  # as FOUND says


class Size(Part, frozen=True):
    """Of one more token at the context of training, all blocks firing, the head read once for each gate that asks it."""

    parameters: typed.Count
    flops: Amount
    state_bytes: Amount


class Losses(Part, frozen=True):
    """Mean nll of every window, which pairs runs, and of all; the error is over windows."""

    nll: Number
    se: Amount
    windows: tuple[Number, ...]
    fire: tuple[typed.Share, ...]
    data: Text


class BlockMean(Part, frozen=True):
    """A gate at the end of training; None where it has no such number."""

    fire: typed.Share
    mu: Number | None
    sigma: Number | None
    tau: Number | None
    alpha: Number | None


class Gates(Part, frozen=True):
    """Means of the last steps."""

    steps: typed.Count
    blocks: Annotated[tuple[BlockMean, ...], Meta(max_length=MOST_BLOCKS)]


class Policy(Part, frozen=True):
    """A choice of tokens: its loss in every window, and how often each block fired."""

    name: Literal["never", "always", "as it is", "gate", "random", "oracle"]
    rate: typed.Share | None  # that was asked for
    fire: tuple[typed.Share, ...]
    nll: Number
    windows: tuple[Number, ...]


class AllRates(Part, frozen=True):
    """Policies at equal firing rates; `notes` say why a gate has none."""

    gate: Words
    data: Text
    policies: tuple[Policy, ...]
    notes: tuple[Words, ...]


class Reach(Part, frozen=True):
    """A task at several sizes, in the order they were asked for."""

    sizes: tuple[Recall, ...]


class Decoded(Part, frozen=True):
    """Decode at one firing rate. Bytes are those of weights and state that a token reads, in float32."""

    rate: typed.Share | None  # that was asked for; None: the gates as they are
    fire: typed.Share
    seconds: Amount  # a token: of the best round, and of the median
    median: Amount
    bytes: Amount
    head_passes: Amount


class Speed(Part, frozen=True):
    """Tokens a second of training (the median step) and of decode; measured once."""

    train: Amount
    context: typed.Positive
    decode: tuple[Decoded, ...]
    notes: tuple[Words, ...]


FOUND: Mapping[str, type] = {
    **{"size": Size, "loss": Losses, "gate": Gates, "value": Value, "rates": AllRates, "choices": Choosing},
    **{"recall": Recall, "reach": Reach, "speed": Speed},
}
