"""Predicts a score from the block's input by a small network, without a pass over the head.

    score = fc2 silu(fc1 x + fc1_bias) + skip x + fc2_bias      in float32
    score = skip x + fc2_bias                                   with hidden = 0

The score is the block's normalised entropy, as in the authors' fitted router, or its gain, the nats
that firing saves. A router is fitted to a trained model (`amor fit`), or learned next to the model
from the sample of tokens that training measures.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from msgspec import Meta
from torch import Tensor, nn

from amor.checks import InnerWidth
from amor.gates.base import Adaptive, EMAOptions, Evidence, Kappa, Verdict
from amor.gates.random import hash_uniform
from amor.ops.linear import linear
from amor.parts import Cost, Linear
from amor.program import NoProgramError, Program, Vector
from amor.typed import Share

BETAS, EPS = (0.9, 0.99), 1e-8  # of Adam, next to training
NETWORK = ("fc1_weight", "fc1_bias", "fc2_weight", "fc2_bias", "skip_weight")


@dataclass(frozen=True)
class RouterOptions(EMAOptions):
    """What is predicted, by how large a network, and which threshold decides."""

    # normalised entropy in [0, 1], or nats saved by firing
    target: Literal["entropy", "gain"] = "entropy"
    hidden: InnerWidth = 512  # width of the hidden layer, the authors' 512; 0: a linear map
    # fire on this fraction of tokens; None: where the score exceeds mu + kappa sigma
    rate: Share | None = None
    kappa: Kappa = 0.2  # the paper's
    lr: Annotated[float, Meta(gt=0, le=1)] = 1e-3  # of Adam, where it is learned next to the model
    # tokens measured in training before it predicts; random until then
    explore: Annotated[int, Meta(ge=1, le=2**30)] = 4096
    # the gate that the model was trained with, which `amor fit --detach` puts back
    replaced: str = ""


class Router(Adaptive[RouterOptions]):
    """A small network that predicts a block's entropy or gain."""

    kind = "router"
    Options = RouterOptions

    fc1_weight: Tensor  # [hidden, D]
    fc1_bias: Tensor  # [hidden]
    fc2_weight: Tensor  # [1, hidden]
    fc2_bias: Tensor  # [1]
    skip_weight: Tensor  # [1, D]
    moments: Tensor  # [2, numbers of the network] of Adam
    num_updates: Tensor  # calls of `learn`; `updates` counts those of `observe`
    measured: Tensor  # tokens it has learned from, in training or when it was fitted
    replaced: Tensor  # [2 + quantiles + 1] mu, sigma, quantiles and updates of the gate it replaced

    def __init__(self, width: int, options: RouterOptions, salt: int):
        super().__init__(width, options, salt)
        self.salt = salt
        hidden = options.hidden
        shapes = ((hidden, width), (hidden,), (1, hidden), (1,), (1, width))
        for name, shape in zip(NETWORK, shapes, strict=True):
            self.register_buffer(name, torch.zeros(shape))
        self.register_buffer("moments", torch.zeros(2, sum(t.numel() for t in self.network())))
        self.register_buffer("replaced", torch.zeros(3 + len(self.quantiles)))
        for name in ("num_updates", "measured"):
            self.register_buffer(name, torch.zeros((), dtype=torch.long))

    @property
    def measures(self) -> str:
        return self.options.target

    def network(self) -> list[Tensor]:
        """Its weights, in the order of NETWORK."""
        return [getattr(self, name) for name in NETWORK]

    def start_statistics(self) -> None:
        # fc2 starts at 0, so a hidden layer of zeros would never learn
        generator = torch.Generator().manual_seed(self.salt)
        width = max(self.fc1_weight.shape[1], 1)
        self.fc1_weight.copy_(torch.randn(self.fc1_weight.shape, generator=generator) * width**-0.5)

    def trained_threshold(self) -> Tensor:
        rate = self.options.rate
        return (
            self.mu + self.options.kappa * self.sigma if rate is None else self.quantile(1 - rate)
        )

    def predict(self, x: Tensor) -> Tensor:
        """x [..., D] -> scores [...], in float32 whatever x is in."""
        with torch.autocast(x.device.type, enabled=False):
            return network_output(x.float(), *self.network())

    def forward(self, evidence: Evidence) -> Verdict:
        score = self.predict(evidence.x)
        if not self.settled():
            uniform = hash_uniform(evidence.position, self.salt + self.num_updates)
            score = torch.where(self.measured >= self.options.explore, score, uniform)
        return Verdict(score > self.threshold, score)

    def fires(self, scores: Sequence[float], positions: Sequence[int]) -> list[bool]:
        return self.above_threshold(scores)

    def program(self, p: Program, x: Vector, score: Vector) -> None:
        if not self.settled():
            raise NoProgramError(
                "gate 'router' has not learned yet: its scores are drawn by position"
            )
        p.dot(x, self.skip_weight[0], self.fc2_bias, score)
        if len(self.fc1_weight):
            with torch.device("meta"):
                layer = Linear(1, 1)
            layer.weight = nn.Parameter(self.fc1_weight, requires_grad=False)
            p.silu_dot(p.linear(x, layer), self.fc1_bias, self.fc2_weight[0], score)

    def cost(self) -> Cost:
        return Cost(
            flops=2 * self.fc1_weight.numel(), weights=sum(t.numel() for t in self.network())
        )

    def decision_tensors(self) -> tuple[Tensor, ...]:
        return *super().decision_tensors(), *self.network(), self.measured

    def settled(self) -> bool:
        """Whether it predicts; always False on a GPU or in a compiled graph, to avoid a sync."""
        known = self.measured.device.type == "cpu" and not torch.compiler.is_compiling()
        return known and int(self.measured) >= self.options.explore

    @torch.no_grad()
    def learn(self, x: Tensor, value: Tensor) -> None:
        """One step of Adam on the squared error of a sample.

        x: the block's inputs, [n, D]; value: the measured target, [n].
        """
        if not len(value):
            return
        if not int(self.num_updates):
            self.fc2_bias.copy_(value.mean())
        explored = int(self.measured) >= self.options.explore
        self.num_updates += 1
        self.measured += len(value)
        self._adam(self._gradient(x.float(), value.float()))
        if not explored and int(self.measured) >= self.options.explore:
            self.updates.zero_()  # statistics so far are those of random scores
            self.observe(self.predict(x))

    def _gradient(self, x: Tensor, value: Tensor) -> Tensor:
        with torch.enable_grad():
            network = [t.detach().requires_grad_() for t in self.network()]
            loss = (network_output(x, *network) - value).square().mean()
            return torch.cat(
                [g.flatten() for g in torch.autograd.grad(loss, network, materialize_grads=True)]
            )

    def _adam(self, gradient: Tensor) -> None:
        step = int(self.num_updates)
        for moment, beta, value in zip(
            self.moments, BETAS, (gradient, gradient.square()), strict=True
        ):
            moment.lerp_(value, 1 - beta)
        first, second = (
            moment / (1 - beta**step) for moment, beta in zip(self.moments, BETAS, strict=True)
        )
        change = self.options.lr * first / (second.sqrt() + EPS)
        network = self.network()
        for t, part in zip(network, change.split([t.numel() for t in network]), strict=True):
            t.sub_(part.view_as(t))

    @torch.no_grad()
    def remember(self, gate: Adaptive) -> None:
        """Keep the statistics of the gate that this one replaces."""
        numbers = torch.cat(
            [t.float().flatten() for t in (gate.mu, gate.sigma, gate.quantiles, gate.updates)]
        )
        self.replaced.copy_(numbers)

    @torch.no_grad()
    def restore(self, gate: Adaptive) -> None:
        """Give a gate the statistics that `remember` kept."""
        mu, sigma, *quantiles, updates = self.replaced
        (
            gate.mu.copy_(mu),
            gate.sigma.copy_(sigma),
            gate.quantiles.copy_(torch.stack(quantiles)),
            gate.updates.copy_(updates),
        )


def network_output(
    x: Tensor, fc1: Tensor, bias: Tensor, fc2: Tensor, bias2: Tensor, skip: Tensor
) -> Tensor:
    """x [..., D] -> [...]; hidden layer and a linear skip."""
    score = linear(x, skip).squeeze(-1) + bias2
    return score + linear(F.silu(linear(x, fc1) + bias), fc2).squeeze(-1) if len(fc1) else score
