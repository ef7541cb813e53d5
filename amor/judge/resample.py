"""Standard errors from the windows themselves: draw windows with replacement, many times, and look at the spread.

Tokens of one window are not independent, windows nearly are; so a window is what is drawn.
"""

import torch
from torch import Tensor

DRAWS = 1000


def ratio(top: Tensor, bottom: Tensor, seed: int = 0) -> tuple[float, float]:
    """sum(top) / sum(bottom) over windows, [n] each, and its standard error; nan where nothing is divided."""
    top, bottom = top.double(), bottom.double()
    if float(bottom.sum()) == 0:
        return float("nan"), float("nan")
    counts = draws(len(top), seed).to(top.device)
    below = counts @ bottom
    spread = ((counts @ top) / below)[below != 0].std()
    return float(top.sum() / bottom.sum()), float(spread)


def mean(values: Tensor, seed: int = 0) -> tuple[float, float]:
    """The mean of values a token, [n, T], and its standard error."""
    return ratio(values.double().sum(1), torch.full((len(values),), values.shape[1]), seed)


def draws(windows: int, seed: int) -> Tensor:
    """[DRAWS, windows] how often each window was drawn; the same for the same seed, so that differences are paired."""
    generator = torch.Generator().manual_seed(seed)
    picked = torch.randint(0, windows, (DRAWS, windows), generator=generator)
    return torch.zeros(DRAWS, windows, dtype=torch.float64).scatter_add_(1, picked, torch.ones(DRAWS, windows).double())
