"""The paper's score with a threshold that holds a firing rate: the entropy that a share `rate` of the tokens met exceeds."""

from dataclasses import dataclass

from torch import Tensor

from amor.gates.entropy import ByEntropy
from amor.typed import Share


@dataclass(frozen=True)
class QuantileOptions:
    rate: Share = 0.22
    eta: Share = 0.01


class Quantile(ByEntropy[QuantileOptions]):
    kind = "quantile"
    Options = QuantileOptions

    def trained_threshold(self) -> Tensor:
        return self.quantile(1 - self.options.rate)
