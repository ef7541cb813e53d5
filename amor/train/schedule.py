"""The learning rate as a function of the step alone: a linear warm-up, then a cosine down to the
floor.
"""

import math

from amor.train.recipe import Rates


def shape(step: int, steps: int, rates: Rates) -> float:
    """The factor of every peak learning rate in a step (the first is 0): 1 at the peak, floor /
    peak in the last step.

    alpha follows the same shape from its own peak, so the ratio of the two learning rates never
    changes.
    """
    if step < rates.warmup:
        return (step + 1) / rates.warmup
    low = rates.floor / rates.peak
    progress = (step - rates.warmup + 1) / max(steps - rates.warmup, 1)  # in (0, 1]
    return low + (1 - low) * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))
