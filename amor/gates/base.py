"""The contract of a gate, and the statistics that let a threshold follow the data.

A gate sees one token at a time: its hidden vector, its position, and statistics of the head's
prediction for it. It never sees a neighbour, a pad or a batch, so training, prefill and decode
decide alike. Its statistics change only in `observe`, which the trainer calls once per optimiser
step with the scores of the whole global batch, and in `learn`, which it calls with the gains
measured on a sample of that batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Generic, Literal, TypeVar

import torch
from msgspec import Meta
from torch import Tensor, nn

from amor import registry
from amor.errors import AmorError
from amor.gates.evidence import Evidence, Verdict
from amor.parts import Cost
from amor.program import NoProgramError, Program, Vector
from amor.typed import Share

OptionsT = TypeVar("OptionsT")


class Gate(nn.Module, Generic[OptionsT]):
    """Decides for every token whether a block's attention runs.

    `Options` is a frozen dataclass of what a config may set. One whose gate has weights that an
    optimiser trains counts them in `parameters(width) -> int`; without that method there are none.
    A subclass may set `needs`, `measures`, `by_position` and `updates_in_forward` as plain class
    attributes.
    """

    kind: str
    Options: ClassVar[type]
    options: OptionsT

    def __init__(self, width: int, options: OptionsT, salt: int):
        """width: of the model; salt: the block's index, so that random gates differ by block."""
        super().__init__()
        self.options = options

    @property
    def needs(self) -> frozenset[str]:
        """Which of entropy, margin and gain must be in its Evidence.

        Each costs a pass over the head.
        """
        return frozenset()

    @property
    def measures(self) -> str:
        """What the trainer measures on sampled tokens for `learn`: "gain", "entropy" or ""."""
        return ""

    @property
    def updates_in_forward(self) -> bool:
        """Whether every training forward updates its statistics, before the decision."""
        return False

    @property
    def by_position(self) -> bool:
        """Whether its decision depends on positions alone, so that a decode step is given it.

        By `fires([], positions)` where it states a program of its score, else by `forward`.
        """
        return False

    def forward(self, evidence: Evidence) -> Verdict:
        """Whether each token fires, and its score."""
        raise NotImplementedError

    @property
    def threshold(self) -> Tensor:
        """The number that scores are compared with; NaN for a gate that compares nothing."""
        return torch.tensor(torch.nan)

    @property
    def decider(self) -> Gate:
        """The gate whose numbers decide: itself, or the one it follows."""
        return self

    def fires(self, scores: Sequence[float], positions: Sequence[int]) -> list[bool]:
        """Whether tokens of these scores and positions fire, as decode decides without building
        tensors.

        For a gate that states a program, or whose score is the entropy it needs. Without it decode
        calls `forward`.
        """
        raise NotImplementedError

    def program(self, p: Program, x: Vector, score: Vector) -> None:
        """Record how decode computes the score of one token: from the block's input x, and
        (`p.head`) from statistics of the head. It fires where the score exceeds the threshold.

        Raises where it needs more.
        """
        raise NoProgramError(f"gate {self.kind!r} states no program")

    def cost(self) -> Cost:
        """What it reads and computes per token by itself, besides passes over the head."""
        return Cost()

    def settled(self) -> bool:
        """Whether it decides by learned numbers; a gate that learns fires at random before that."""
        return True

    def version_key(self) -> tuple[object, ...]:
        """A key that changes whenever a number changes that its program or its threshold uses."""
        return ()

    def start_statistics(self) -> None:
        """Set the statistics that a fresh model begins with; buffers are 0 before."""

    def observe(self, scores: Tensor) -> None:
        """Update the statistics by the scores of one optimiser step.

        scores: of every real token of the global batch, of any shape.
        """

    def observe_step(self, scores: Tensor) -> None:
        """`observe` at the end of an optimiser step, unless the forwards of the step did it."""
        if not self.updates_in_forward:
            self.observe(scores)

    def learn(self, x: Tensor, value: Tensor) -> None:
        """Learn from values [n] measured on sampled tokens of one optimiser step.

        x: the block's inputs at these tokens, [n, D].
        """

    def aim(self, rate: float | None) -> None:
        """Fire on about this fraction of tokens from now on.

        None goes back to the trained threshold.
        """
        raise AmorError(
            f"gate {self.kind!r} keeps no score quantiles, so it cannot aim at a firing rate"
        )


def find_gate(kind: str) -> type[Gate[Any]]:
    """The class of a gate kind, or of `package.module.Class`."""
    return registry.find("gates", kind)


def matches_forward(gate: type[Gate], name: str) -> bool:
    """Whether the method `name` (fires or program) describes the class's own forward.

    False where it is missing, or inherited from above a class that has overridden `forward` since.
    """
    forward, method = (
        next(base for base in gate.__mro__ if word in vars(base)) for word in ("forward", name)
    )
    return method is not Gate and issubclass(method, forward)


@dataclass(frozen=True)
class Nothing:
    """Options of a gate that has none."""


SKETCH = 257  # quantiles kept, 0 to 1 in even steps
# buffers under their earlier names, so that a file which has them is refused with the new ones
RENAMED_BUFFERS = {
    "doubt": "inv_effective_n",
    "reach": "pred_std",
    "lessons": "num_updates",
    "level": "mean_gain",
    "shared": "cov_xg",
}


@dataclass(frozen=True)
class EMAOptions:
    """What every adaptive gate's options have."""

    eta: Share = 0.01  # weight of a new batch in the EMA of the statistics; the paper's


AdaptiveT = TypeVar("AdaptiveT", bound=EMAOptions)


class Adaptive(Gate[AdaptiveT]):
    """A gate whose threshold follows its scores: an EMA over steps of batch statistics.

    Until the first `observe` it never fires: a model starts as its backbone.
    """

    mu: Tensor
    sigma: Tensor
    quantiles: Tensor
    updates: Tensor

    def __init__(self, width: int, options: AdaptiveT, salt: int):
        super().__init__(width, options, salt)
        self.register_buffer("mu", torch.zeros(()))
        self.register_buffer("sigma", torch.zeros(()))
        self.register_buffer("quantiles", torch.zeros(SKETCH))
        self.register_buffer("updates", torch.zeros((), dtype=torch.long))
        self.aimed: float | None = None
        self._observed = False
        # version_key, and the threshold at that version
        self._known: tuple[tuple[object, ...], float] | None = None

    def without_statistics(self) -> bool:
        """Whether it has observed nothing yet, and so never fires.

        Once it has, a GPU is not synchronised again to find out.
        """
        self._observed = self._observed or int(self.updates) > 0
        return not self._observed

    def trained_threshold(self) -> Tensor:
        """The threshold by the statistics of training, where no firing rate is aimed at."""
        raise NotImplementedError

    @property
    def threshold(self) -> Tensor:
        if self.aimed is not None:
            return self.quantile(1 - self.aimed)
        return torch.where(self.updates > 0, self.trained_threshold(), torch.inf)

    def decision_tensors(self) -> tuple[Tensor, ...]:
        """Every tensor that the decision depends on."""
        return self.mu, self.sigma, self.quantiles, self.updates

    def version_key(self) -> tuple[object, ...]:
        return (self.aimed, *((t.data_ptr(), t._version) for t in self.decision_tensors()))

    def threshold_value(self) -> float:
        """The threshold as a Python float, cached by version_key.

        Decode needs it at every token.
        """
        now = self.version_key()
        if self._known is None or self._known[0] != now:
            self._known = now, float(self.threshold)
        return self._known[1]

    def above_threshold(self, scores: Sequence[float]) -> list[bool]:
        """`fires` of a gate that fires where its score exceeds the threshold."""
        threshold = self.threshold_value()
        return [score > threshold for score in scores]

    def quantile(self, q: float) -> Tensor:
        """A quantile of past scores, interpolated linearly between those kept."""
        if q >= 1:
            return torch.full_like(self.mu, torch.inf)
        if q <= 0:
            return torch.full_like(self.mu, -torch.inf)
        place = q * (SKETCH - 1)
        low = int(place)
        return torch.lerp(
            self.quantiles[low], self.quantiles[min(low + 1, SKETCH - 1)], place - low
        )

    @torch.no_grad()
    def observe(self, scores: Tensor) -> None:
        if scores.numel() == 0:
            return
        ordered = scores.detach().float().flatten().sort().values
        last = len(ordered) - 1
        places = torch.linspace(0, 1, SKETCH, device=ordered.device, dtype=torch.float64) * last
        low = places.long()
        sketch = torch.lerp(
            ordered[low], ordered[(low + 1).clamp(max=last)], (places - low).float()
        )
        # of an even number the lower middle one, as torch.median; the std of one token is 0; in
        # float64, so that the number of threads cannot move its last bit
        std = ordered.double().std(correction=1 if self.updates_in_forward and last else 0).float()
        for name, value in {"mu": ordered[last // 2], "sigma": std, "quantiles": sketch}.items():
            buffer = getattr(self, name)
            known = self.updates > 0
            if name == "quantiles":  # a gate may start with a median and a std alone
                known = known & self.quantiles.any()
            eta = torch.where(known, self.options.eta, 1.0).to(ordered.device)
            buffer.copy_(torch.lerp(buffer, value, eta))
        self.updates += 1

    def aim(self, rate: float | None) -> None:
        if rate is not None:
            if not 0 <= rate <= 1:
                raise AmorError(f"firing rate {rate} is not between 0 and 1")
            if int(self.updates) == 0:
                raise AmorError(
                    "this gate has no statistics yet, so it has no quantiles; train or calibrate "
                    "it first"
                )
            if not bool(self.quantiles.any()):
                raise AmorError(
                    "this gate has a threshold but no quantiles of its scores, so it cannot aim "
                    "at a firing rate; "
                    "calibrate it on text first: amor fit MODEL --data DATA --target none"
                )
        self.aimed = rate


def lacks_statistics(gate: nn.Module) -> bool:
    """Whether a gate decides by statistics that the trainer has to give it, and has none yet."""
    return isinstance(gate, Adaptive) and not gate.updates_in_forward and not int(gate.updates)


Kappa = Annotated[float, Meta(ge=-1e6, le=1e6)]


@dataclass(frozen=True)
class MedianOptions(EMAOptions):
    """Threshold = mu + kappa sigma, with mu and sigma EMAs of the median and std of batches."""

    kappa: Kappa = 0.2  # the paper's
    # (mu, sigma) before the first batch; (): the first batch's own
    start: Annotated[tuple[Kappa, ...], Meta(max_length=2)] = ()
    # EMA once per optimiser step, or in every training forward, over its own tokens
    update: Literal["step", "forward"] = "step"

    def __post_init__(self) -> None:
        if len(self.start) == 1:
            raise AmorError(
                f"start: {list(self.start)} is one number; give the median and the std, e.g. "
                "[0.3, 0.1]"
            )


class MedianGate(Adaptive[MedianOptions]):
    """Fires where the score exceeds mu + kappa sigma."""

    Options = MedianOptions

    @property
    def updates_in_forward(self) -> bool:
        return self.options.update == "forward"

    def start_statistics(self) -> None:
        if self.options.start:
            for buffer, value in zip(
                (self.mu, self.sigma, self.updates), (*self.options.start, 1), strict=True
            ):
                buffer.fill_(value)

    def trained_threshold(self) -> Tensor:
        return self.mu + self.options.kappa * self.sigma

    def judge(self, score: Tensor) -> Verdict:
        """Fire where the score exceeds the threshold."""
        return Verdict(score > self.threshold, score)
