"""Standard errors by the bootstrap over windows: the std over draws of windows with replacement.

Tokens of one window are not independent, windows nearly are; so windows are resampled, not tokens.
"""

from typing import Any

import numpy as np
from torch import Tensor

from amor.numbers import bootstrap_draws

DRAWS = 1000  # the error of the error is then about 2 %


def ratio(top: Tensor, bottom: Tensor, seed: int = 0) -> tuple[float, float]:
    """sum(top) / sum(bottom) over windows, [n] each, and its standard error; nan where the divisor
    is 0.

    The same seed draws the same windows, so that errors of differences are paired.
    """
    each = [values.double().cpu().numpy() for values in (top, bottom)]
    if each[1].sum() == 0:
        return float("nan"), float("nan")
    value = float(each[0].sum() / each[1].sum())
    if len(each[0]) == 1:
        return value, 0.0
    with np.errstate(divide="ignore", invalid="ignore"):
        drawn = bootstrap_draws(_ratio, each, DRAWS, seed)
    return value, float(drawn[np.isfinite(drawn)].std(ddof=1))  # without draws whose divisor is 0


def _ratio(top: Any, bottom: Any, axis: int) -> Any:
    return top.sum(axis) / bottom.sum(axis)


def mean(values: Tensor, seed: int = 0) -> tuple[float, float]:
    """The mean of values per token, [n, T], and its standard error."""
    windows = values.double().sum(1)
    return ratio(windows, windows.new_full((len(values),), values.shape[1]), seed)
