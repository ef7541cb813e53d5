"""The paper's score with a threshold that keeps a firing rate.

The threshold is the entropy that a fraction `rate` of past tokens exceeds.
"""

from dataclasses import dataclass

from torch import Tensor

from amor.gates.base import EMAOptions
from amor.gates.entropy import ByEntropy
from amor.typed import Share


@dataclass(frozen=True)
class QuantileOptions(EMAOptions):
    """The firing rate, and how fast the threshold follows the scores."""

    rate: Share = 0.22  # fraction of tokens that fire; the 22 % of the paper's earlier version


class Quantile(ByEntropy[QuantileOptions]):
    """The paper's score at a fixed firing rate."""

    kind = "quantile"
    Options = QuantileOptions

    def trained_threshold(self) -> Tensor:
        return self.quantile(1 - self.options.rate)
