"""What `amor fit` finds: how well routers predict, how they decide, and what that saves."""

from amor import typed
from amor.records import Amount, Number, Record, Steps, Words
from amor.records.value import Choosing, TextSource


class NetworkFit(Record, frozen=True):
    """The network of one block on tokens it was not fitted to."""

    tokens: Steps  # collected
    explained: Number  # fraction of the target's variance
    explained_linear: Number  # the same by the linear map alone
    epochs: Steps  # 0: the hidden layer did not help


class CalibrationBin(Record, frozen=True):
    """A tenth of the tokens, in the order of predictions."""

    predicted: Number
    measured: Number


class Decisions(Record, frozen=True):
    """A router beside the gate it replaces, on held-out text."""

    agreement: typed.Share  # tokens on which both decide alike
    native_rate: typed.Share
    router_rate: typed.Share
    calibration: tuple[CalibrationBin, ...]


class FitCost(Record, frozen=True):
    """Per token, beside the backbone and one pass over the head."""

    router_flops: Amount
    native_flops: Amount  # of the passes over the head that the replaced gates ask for


class FitReport(typed.File, frozen=True):
    """fit.json"""

    model: Words
    target: Words
    decide: Words
    hidden: Steps
    fitted_on: TextSource
    networks: tuple[NetworkFit, ...]
    held_out: TextSource
    decisions: tuple[Decisions, ...]
    cost: FitCost
    # nats saved at equal firing rates, beside other gates; None: not asked for
    choices: Choosing | None
