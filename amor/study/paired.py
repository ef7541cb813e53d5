"""Two models on the same documents: how far apart they are, and how sure that is.

Whether a document is hard moves both models alike. The error of the difference is that of the
differences document by document, which is mostly far smaller than the two errors of the two scores
would suggest, and is never made from these.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from amor.numbers import bootstrap_draws

Numbers = NDArray[np.float64]


def standard_error(values: Numbers) -> float:
    """Of the mean of independent values; 0 for one value, which tells nothing of it."""
    return float(values.std(ddof=1)) / len(values) ** 0.5 if len(values) > 1 else 0.0


@dataclass(frozen=True)
class Scores:
    """One number per document, in the order of document ids."""

    ids: NDArray[np.int64]
    values: Numbers
    over: Literal["mean", "exp"] = "mean"

    def score(self, means: Numbers) -> Numbers:
        """The task's number from a mean over documents."""
        return np.exp(np.minimum(-means, 700.0)) if self.over == "exp" else means

    @property
    def mean(self) -> float:
        """The task's number over all documents."""
        return float(self.score(self.values.mean()))

    @property
    def error(self) -> float | None:
        """The standard error of the score; of one document there is none."""
        if len(self.values) < 2:
            return None
        return standard_error(self.values) * (self.mean if self.over == "exp" else 1.0)


@dataclass(frozen=True)
class Gap:
    """By how much one is better than the other, per document on average (of log-likelihoods: in
    nats), and the error of that."""

    size: float
    error: float

    @property
    def clear(self) -> bool:
        """Better by more than two standard errors."""
        return self.size > 2 * self.error

    @property
    def none(self) -> bool:
        """Within two standard errors of no difference."""
        return abs(self.size) <= 2 * self.error


def gap(a: Scores, b: Scores) -> Gap | None:
    """By how much `a` is better than `b`; None where fewer than two documents tell nothing of an
    error."""
    differences = a.values - b.values
    if len(differences) < 2:
        return None
    return Gap(float(differences.mean()), standard_error(differences))


def mean_gap(gaps: list[Gap]) -> Gap:
    """Of the average of several tasks, whose documents have nothing to do with each other."""
    return Gap(
        sum(g.size for g in gaps) / len(gaps), sum(g.error**2 for g in gaps) ** 0.5 / len(gaps)
    )


def resampled(a: Scores, b: Scores, samples: int, random: np.random.Generator) -> Numbers:
    """The difference of the two scores in each of many draws of the documents, with replacement;
    both get the same draws."""

    def difference(mine: Numbers, theirs: Numbers, axis: int) -> Numbers:
        return a.score(mine.mean(axis)) - b.score(theirs.mean(axis))

    return bootstrap_draws(difference, (a.values, b.values), samples, random)


@dataclass(frozen=True)
class Grid:
    """One number per seed and window of text, of one row of a study.

    Two things could have been drawn otherwise: the windows, and the seed (of weights and of the
    order of data). The error is the root of both squares: that of the windows' means over seeds,
    and that of the seeds' means over windows. What both share is counted twice, so it is rather too
    large; of one seed only the windows count, and the table notes it.
    """

    seeds: tuple[int, ...]
    values: Numbers  # [seeds, windows]
    text: Hashable = None  # what the windows are of: those of another text are no match

    @property
    def mean(self) -> float:
        """The mean over seeds and windows."""
        return float(self.values.mean())

    @property
    def windows(self) -> int:
        """How many windows of text were measured."""
        return self.values.shape[1]

    @property
    def error(self) -> float:
        """The standard error of the mean, of windows and seeds together."""
        return sum(standard_error(self.values.mean(axis)) ** 2 for axis in (0, 1)) ** 0.5

    def less(self, other: Grid) -> Grid:
        """The difference, seed by seed and window by window; seeds that only one has are left
        out."""
        shared = tuple(seed for seed in self.seeds if seed in other.seeds)
        mine, theirs = (g.values[[g.seeds.index(seed) for seed in shared]] for g in (self, other))
        return Grid(shared, mine - theirs, self.text)

    def ahead(self, other: Grid) -> Gap | None:
        """By how much lower, which of losses is better; None where nothing can be paired."""
        same = (self.text, self.windows) == (other.text, other.windows)
        if not same or not set(self.seeds) & set(other.seeds):
            return None
        difference = other.less(self)
        return Gap(difference.mean, difference.error)
