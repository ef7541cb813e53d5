"""Fires where a linear prediction, from what the block reads, says that firing saves the most.

The nats a token saves by firing are measured on a small sample of every training step (amor/models/measure.py). The gate keeps
moving averages of their moments and solves for the weights after every step: ridge regression, without a gradient, without a
share in the optimiser, and without a reading of the head in decode. The threshold is the quantile of scores that holds a rate.

Letters: x what the block reads, g its measured gain, C the covariance of x, c that of x and g, n tokens that the averages are
worth. w = (C + ridge)^-1 c. The ridge is the one that fits best where a share r of the spread of gains can be foreseen, from all
channels alike: mean(diag C) D / (n r).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from msgspec import Meta
from torch import Tensor

from amor.gates.base import Adaptive, Evidence, Verdict
from amor.gates.random import spread
from amor.ops.linear import linear
from amor.program import Program, UnsaidError, Vector
from amor.typed import Share

UNIFORM = 0.5, 12**-0.5  # mean and spread of the scores it explores with


@dataclass(frozen=True)
class GainOptions:
    rate: Share = 0.22  # of tokens that fire
    eta: Share = 0.01  # of the threshold's statistics
    pace: Share = 0.01  # of the moments: what the sample of one step counts, once 1 / pace steps were met
    foreseen: Annotated[float, Meta(gt=0, le=1)] = 0.05  # r
    explore: Annotated[int, Meta(ge=1, le=2**30)] = 256  # tokens to be measured before it predicts


class Gain(Adaptive[GainOptions]):
    """Until enough was measured and firing has made a difference it explores: at its rate, on positions drawn anew each step."""

    kind = "gain"
    Options = GainOptions
    measures = "gain"

    weight: Tensor
    bias: Tensor
    center: Tensor  # mean of x
    level: Tensor  # mean of g
    covariance: Tensor  # C
    shared: Tensor  # c
    doubt: Tensor  # 1 / n
    lessons: Tensor  # steps it has learned from
    measured: Tensor  # tokens in all
    reach: Tensor  # spread of its predictions; 0 while it explores

    def __init__(self, width: int, options: GainOptions, salt: int):
        super().__init__(width, options, salt)
        self.salt = salt
        for name, shape in (("weight", width), ("center", width), ("shared", width), ("covariance", (width, width))):
            self.register_buffer(name, torch.zeros(shape))
        for name in ("bias", "level", "doubt", "reach"):
            self.register_buffer(name, torch.zeros(()))
        for name in ("lessons", "measured"):
            self.register_buffer(name, torch.zeros((), dtype=torch.long))

    def trained_threshold(self) -> Tensor:
        return self.quantile(1 - self.options.rate)

    def forward(self, evidence: Evidence) -> Verdict:
        with torch.autocast(evidence.x.device.type, enabled=False):  # nats differ by less than bf16 can tell
            predicted = linear(evidence.x.float(), self.weight.float()[None]).squeeze(-1) + self.bias.float()
        score = predicted if self.settled() else self._explored(predicted, evidence.position)
        return Verdict(score > self.threshold, score)

    def between(self, low: Sequence[float], high: Sequence[float], position: Sequence[int]) -> list[bool | None]:
        return self.by_cut(low, high)

    def program(self, p: Program, x: Vector, score: Vector) -> None:
        if not self.settled():
            raise UnsaidError("gate 'gain' explores, on positions it draws")
        p.dot(x, self.weight, self.bias, score)

    def made_of(self) -> tuple[Tensor, ...]:
        return *super().made_of(), self.weight, self.bias, self.reach

    def _explored(self, predicted: Tensor, position: Tensor) -> Tensor:
        return torch.where(self.reach > 0, predicted, spread(position, self.salt + self.lessons))

    def settled(self) -> bool:
        """Whether it predicts, where looking costs nothing: a device would have to be waited for, and a graph would break."""
        return self.reach.device.type == "cpu" and not torch.compiler.is_compiling() and bool(self.reach > 0)

    @torch.no_grad()
    def learn(self, x: Tensor, value: Tensor) -> None:
        gain = value
        if not len(gain):
            return
        self.lessons += 1
        self.measured += len(gain)
        self._average(x.double(), gain.double())
        C, c = self.covariance.double(), self.shared.double()
        if int(self.measured) < self.options.explore or not bool(c.any()):
            return
        ridge = C.diagonal().sum() * self.doubt / self.options.foreseen
        w = torch.linalg.solve(C + ridge * torch.eye(len(c), dtype=C.dtype, device=C.device), c)
        self._move(w, C)

    def _average(self, x: Tensor, gain: Tensor) -> None:
        """Take the moments of one sample, x [n, D] and gain [n], into the averages; at first all samples count alike."""
        count, pace = len(gain), max(self.options.pace, 1 / int(self.lessons))
        center, level = x.mean(0), gain.mean()
        to_center, to_level = center - self.center, level - self.level
        x, gain = x - center, gain - level

        def mixed(old: Tensor, new: Tensor, between: Tensor) -> None:
            """Of two groups together: the averages of either, and what lies between their means."""
            old.copy_((1 - pace) * old.double() + pace * new / count + pace * (1 - pace) * between)

        mixed(self.covariance, x.T @ x, torch.outer(to_center, to_center))
        mixed(self.shared, x.T @ gain, to_center * to_level)
        self.center.copy_(self.center + pace * to_center)
        self.level.copy_(self.level + pace * to_level)
        self.doubt.copy_((1 - pace) ** 2 * self.doubt + pace**2 / count)

    def _move(self, w: Tensor, C: Tensor) -> None:
        """Predict by w from now on. What is known of scores is moved along, so that the threshold still holds its rate."""
        center, old = self.center.double(), self.weight.double()
        mean, wide = (self.bias + old @ center, (old @ C @ old).sqrt()) if bool(self.reach > 0) else UNIFORM
        reach = (w @ C @ w).sqrt()
        for known in (self.mu, self.quantiles):
            known.copy_(self.level + (known - mean) * (reach / wide))  # the mean of predictions is that of gains
        self.sigma.copy_(self.sigma * (reach / wide))
        self.bias.copy_(self.level - w @ center)
        self.weight.copy_(w)
        self.reach.copy_(reach)
