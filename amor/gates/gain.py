"""Fires where a linear prediction, from the block's input, expects that firing saves the most.

The nats that firing saves at a token are measured on a small sample of every training step
(amor/models/measure.py). The gate keeps EMAs of their moments and solves for the weights after
every step: ridge regression, without a gradient, without the optimiser, and without a pass over the
head in decode. The threshold is the quantile of scores that gives a firing rate.

Letters: x the block's input, g its measured gain, C the covariance of x, c that of x and g, n the
effective number of tokens in the averages. w = (C + ridge)^-1 c. The ridge is the best one if x
explains a fraction r of the variance of gains, from all channels alike: mean(diag C) D / (n r).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from msgspec import Meta
from torch import Tensor

from amor.gates.base import Adaptive, EMAOptions, Evidence, Verdict
from amor.gates.random import hash_uniform
from amor.ops.linear import linear
from amor.program import NoProgramError, Program, Vector
from amor.typed import Share

UNIFORM = 0.5, 12**-0.5  # mean and std of the scores it explores with


@dataclass(frozen=True)
class GainOptions(EMAOptions):
    """How fast the regression and the threshold follow the data, and how often the gate fires."""

    rate: Share = 0.22  # fraction of tokens that fire; the 22 % of the paper's earlier version
    # weight of a step's sample in the EMA of the moments; the first 1 / ema_rate steps count alike
    ema_rate: Share = 0.01
    # r: assumed fraction of the variance of gains that x can explain; smaller is a stronger ridge
    explained_variance: Annotated[float, Meta(gt=0, le=1)] = 0.05
    # tokens measured before it predicts; fires at random until then
    explore: Annotated[int, Meta(ge=1, le=2**30)] = 256

    RENAMED: ClassVar[Mapping[str, str]] = {"pace": "ema_rate", "foreseen": "explained_variance"}


class Gain(Adaptive[GainOptions]):
    """Ridge regression of measured gains on the block's input.

    Until enough gains are measured, and one differs from zero, it explores: it fires at its rate,
    on other positions each step.
    """

    kind = "gain"
    Options = GainOptions
    measures = "gain"

    weight: Tensor  # [D]
    bias: Tensor
    center: Tensor  # [D] mean of x
    mean_gain: Tensor  # mean of g
    covariance: Tensor  # [D, D] C
    cov_xg: Tensor  # [D] c
    inv_effective_n: Tensor  # 1 / n
    num_updates: Tensor  # calls of `learn`; `updates` counts those of `observe`
    measured: Tensor  # tokens in all
    pred_std: Tensor  # std of its predictions; 0 while it explores

    def __init__(self, width: int, options: GainOptions, salt: int):
        super().__init__(width, options, salt)
        self.salt = salt
        for name, shape in (
            ("weight", width),
            ("center", width),
            ("cov_xg", width),
            ("covariance", (width, width)),
        ):
            self.register_buffer(name, torch.zeros(shape))
        for name in ("bias", "mean_gain", "inv_effective_n", "pred_std"):
            self.register_buffer(name, torch.zeros(()))
        for name in ("num_updates", "measured"):
            self.register_buffer(name, torch.zeros((), dtype=torch.long))

    def trained_threshold(self) -> Tensor:
        return self.quantile(1 - self.options.rate)

    def forward(self, evidence: Evidence) -> Verdict:
        # nats differ by less than bf16 can tell
        with torch.autocast(evidence.x.device.type, enabled=False):
            predicted = (
                linear(evidence.x.float(), self.weight.float()[None]).squeeze(-1)
                + self.bias.float()
            )
        score = predicted if self.settled() else self._explored(predicted, evidence.position)
        return Verdict(score > self.threshold, score)

    def fires(self, scores: Sequence[float], positions: Sequence[int]) -> list[bool]:
        return self.above_threshold(scores)

    def program(self, p: Program, x: Vector, score: Vector) -> None:
        if not self.settled():
            raise NoProgramError("gate 'gain' explores, on positions it draws")
        p.dot(x, self.weight, self.bias, score)

    def decision_tensors(self) -> tuple[Tensor, ...]:
        return *super().decision_tensors(), self.weight, self.bias, self.pred_std

    def _explored(self, predicted: Tensor, position: Tensor) -> Tensor:
        return torch.where(
            self.pred_std > 0, predicted, hash_uniform(position, self.salt + self.num_updates)
        )

    def settled(self) -> bool:
        """Whether it predicts; always False on a GPU or in a compiled graph, to avoid a sync."""
        return (
            self.pred_std.device.type == "cpu"
            and not torch.compiler.is_compiling()
            and bool(self.pred_std > 0)
        )

    @torch.no_grad()
    def learn(self, x: Tensor, value: Tensor) -> None:
        gain = value
        if not len(gain):
            return
        self.num_updates += 1
        self.measured += len(gain)
        self._average(x.double(), gain.double())
        C, c = self.covariance.double(), self.cov_xg.double()
        if int(self.measured) < self.options.explore or not bool(c.any()):
            return
        ridge = C.diagonal().sum() * self.inv_effective_n / self.options.explained_variance
        w = torch.linalg.solve(C + ridge * torch.eye(len(c), dtype=C.dtype, device=C.device), c)
        self._move(w, C)

    def _average(self, x: Tensor, gain: Tensor) -> None:
        """Update the EMAs of the moments by one sample, x [n, D] and gain [n].

        The first samples count alike.
        """
        count, eta = len(gain), max(self.options.ema_rate, 1 / int(self.num_updates))
        center, mean_gain = x.mean(0), gain.mean()
        to_center, to_mean = center - self.center, mean_gain - self.mean_gain
        x, gain = x - center, gain - mean_gain

        def pool(old: Tensor, new: Tensor, between_means: Tensor) -> None:
            """The covariance of two groups pooled: within either, and between their means."""
            old.copy_(
                (1 - eta) * old.double() + eta * new / count + eta * (1 - eta) * between_means
            )

        pool(self.covariance, x.T @ x, torch.outer(to_center, to_center))
        pool(self.cov_xg, x.T @ gain, to_center * to_mean)
        self.center.copy_(self.center + eta * to_center)
        self.mean_gain.copy_(self.mean_gain + eta * to_mean)
        self.inv_effective_n.copy_((1 - eta) ** 2 * self.inv_effective_n + eta**2 / count)

    def _move(self, w: Tensor, C: Tensor) -> None:
        """Predict by w from now on.

        Shift and scale the stored statistics of scores, so that the threshold keeps its rate.
        """
        center, old = self.center.double(), self.weight.double()
        mean, std = (
            (self.bias + old @ center, (old @ C @ old).sqrt())
            if bool(self.pred_std > 0)
            else UNIFORM
        )
        pred_std = (w @ C @ w).sqrt()
        for known in (self.mu, self.quantiles):
            # the mean of predictions is that of gains
            known.copy_(self.mean_gain + (known - mean) * (pred_std / std))
        self.sigma.copy_(self.sigma * (pred_std / std))
        self.bias.copy_(self.mean_gain - w @ center)
        self.weight.copy_(w)
        self.pred_std.copy_(pred_std)
