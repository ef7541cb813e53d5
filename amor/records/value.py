"""What a gate is worth: the results of amor/judge/value.py and amor/judge/choosing.py, for pages
and figures."""

import msgspec

from amor import typed
from amor.records import Amount, Number, Record, Steps, Words


class TextSource(Record, frozen=True):
    """The text that a model was measured on."""

    source: Words
    windows: Steps
    context: Steps
    tokens: Steps
    documents: Words


class Level(Record, frozen=True):
    """A loss in nats per token and its standard error."""

    nll: Number
    se: Amount


class PolicyLoss(Level, frozen=True):
    """Mean nll of a choice of tokens, and what it saves over never firing."""

    saved: Number
    saved_se: Amount
    fire_rate: tuple[typed.Share, ...]


class GatePolicy(PolicyLoss, frozen=True):
    """The model's own gate."""

    over_random_se: Amount  # the error of what it saves more than chance


class Policies(Record, frozen=True):
    """Every choice of tokens that is compared."""

    never: PolicyLoss
    gate: GatePolicy
    always: PolicyLoss
    random: PolicyLoss
    oracle: PolicyLoss
    oracle_free: PolicyLoss


class Quantiles(Record, frozen=True):
    """Quantiles of the gain of firing, in nats."""

    p1: Number = msgspec.field(name="1%")
    p10: Number = msgspec.field(name="10%")
    p50: Number = msgspec.field(name="50%")
    p90: Number = msgspec.field(name="90%")
    p99: Number = msgspec.field(name="99%")


class Gains(Record, frozen=True):
    """How the gain of firing is spread over tokens."""

    name: Words
    mean: Number
    se: Amount
    positive: typed.Share
    positive_se: Amount
    quantiles: Quantiles
    rank_correlation: Number | None


class Agreement(Record, frozen=True):
    """The tokens a gate fires on against those it should; None where there are none to count."""

    block: Steps
    fire_rate: typed.Share
    best: Number | None
    best_se: Amount | None
    precision: Number | None
    precision_se: Amount | None
    recall: Number | None
    recall_se: Amount | None
    precision_by_chance: Number | None
    precision_by_chance_se: Amount | None
    captured: Number | None
    captured_se: Amount | None
    captured_by_chance: Number | None


class Bin(Record, frozen=True):
    """Tokens of like entropy: their mean gain."""

    entropy: Number
    gain: Number
    se: Amount | None
    tokens: Steps


class Point(Record, frozen=True, omit_defaults=True):
    """Losses at one firing rate; a gate that cannot aim at a rate has none."""

    aim: typed.Share
    fire_rate: typed.Share
    blocks: tuple[typed.Share, ...]
    random: Level
    oracle: Level
    gate: Level | None = None


class Value(typed.File, frozen=True):
    """value.json: the account of one model on one text."""

    model: Words
    gate: Words
    blocks: Steps
    data: TextSource
    exact: bool
    notes: tuple[Words, ...]
    losses: Policies
    gains: tuple[Gains, ...]  # one per block, and all blocks together
    agreement: tuple[Agreement, ...]
    calibration: tuple[tuple[Bin, ...], ...]
    curve: tuple[Point, ...]


class Saving(Record, frozen=True):
    """Nats per token that one choice saves over another (by itself: over never firing), and the
    paired error."""

    saved: Number
    se: Amount


class Choice(Record, frozen=True):
    """A way of choosing tokens: at every rate what it saves, and how much more than the paper's
    gate does."""

    name: Words
    levels: tuple[Saving, ...]
    over_paper: tuple[Saving, ...]


class Choosing(typed.File, frozen=True):
    """What amor/judge/choosing.py finds: other gates in front of the same attention."""

    model: Words
    data: TextSource
    rates: tuple[typed.Share, ...]
    own: Saving  # the model as it is
    always: Saving
    choices: tuple[Choice, ...]
