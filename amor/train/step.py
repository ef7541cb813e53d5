"""One optimiser step: micro-batches forward and backward, one clipped update, and the gates'
statistics.

Gate statistics: every gate decides with the numbers from before the step, and takes in the scores
of the whole global batch once, after it. In the very first step there are none yet: a pass without
gradient over the batch initialises them, the step decides with those, and the same scores are not
taken in a second time. Blocks start as no-ops, so the scores of that pass are the scores of the
step.

In the first `open_steps` of a recipe gates decide nothing: blocks fire everywhere, and gates take
in the scores they would have decided by.

Gates that learn from gains have them measured on a sample of the step's tokens (sample.py), and
take them in with the scores.
"""

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from amor.data.loader import BatchSource, Windows, paired
from amor.errors import AmorError
from amor.gates.base import Adaptive, lacks_statistics
from amor.gates.warmup import ForcedOpen
from amor.models.amor import Amor, Output
from amor.models.block import GateTrace
from amor.models.gated import PassOptions
from amor.models.measure import Measured
from amor.numbers import finite
from amor.ops.head import IGNORE
from amor.records.run import GateLine
from amor.state import State
from amor.train.distributed import World
from amor.train.optim import set_rate, shape
from amor.train.recipe import Recipe
from amor.train.sample import sampled
from amor.train.trouble import NonFiniteError, Spikes


@dataclass
class MicroBatchStats:
    """Sums and lists over the micro-batches of a step on this rank."""

    loss: Tensor  # float64 scalar: the sum of the losses
    scores: list[list[Tensor]] = field(default_factory=list)  # per block, per micro-batch: [tokens]
    fired: list[Tensor] = field(default_factory=list)  # per block: tokens that fired
    # measured gains per micro-batch, per block
    measured: list[tuple[Measured | None, ...]] = field(default_factory=list)

    def add(
        self, loss: Tensor, gates: tuple[GateTrace, ...], measured: tuple[Measured | None, ...] = ()
    ) -> None:
        """Take in one micro-batch: its loss, and per block decisions and measured gains."""
        self.measured.append(measured)
        self.loss = self.loss + loss.detach().double()
        if not self.scores:
            self.scores = [[] for _ in gates]
            self.fired = [torch.zeros_like(self.loss) for _ in gates]
        for block, gate in enumerate(gates):
            self.scores[block].append(gate.score.flatten())
            self.fired[block] += gate.fire.sum()


@dataclass(frozen=True)
class StepResult:
    """One optimiser step over the global batch."""

    loss: float  # mean nll per scored target, in nats; finite
    lr: float  # learning rate of matrices and vectors
    norm: float  # of the whole gradient, before clipping; finite
    spike: str | None  # "taken" or "skipped" if the norm was a spike
    blocks: tuple[GateLine, ...]  # one per gated block


class Stepper:
    """Takes optimiser steps with a model, an optimiser and a source of batches."""

    def __init__(
        self,
        model: Amor,
        optimizer: torch.optim.Optimizer,
        recipe: Recipe,
        source: BatchSource,
        world: World,
        end_of_text: int | None = None,
    ):
        """end_of_text: the token that ends a document, for recipes that keep documents apart."""
        self.model, self.optimizer, self.recipe = model, optimizer, recipe
        self.source, self.world = source, world
        self.apart = boundary(recipe.documents, end_of_text)
        self.blocks = model.each_block()
        self.spikes = Spikes(recipe.optimiser.spike)
        self.updates = 0  # optimiser steps that changed the weights
        self.first, self.last = world.local_rows(recipe.batch)
        check_precision(recipe.precision, world.device)

    def __call__(self, step: int) -> StepResult:
        """Take step number `step` (the first is 0); NonFiniteError before anything is changed."""
        lr_scale = shape(step, self.recipe.total_steps, self.recipe.lr)
        set_rate(self.optimizer, lr_scale)
        batches = list(self.micro_batches(step))
        initialised = self.init_gate_stats(batches)
        used = self.gate_numbers()
        stats = self.forward_backward(batches, step)
        self.world.reduce_gradients(self.model)
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        norm = float(self.world.full_tensor(torch.nn.utils.get_total_norm(gradients)))
        loss = float(self.world.sum(stats.loss))
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise NonFiniteError(step, loss, norm)
        scores, measured = self.gather_scores(stats), self.gather_measured(stats)
        spike = self.spikes.is_spike(norm)
        skipped = spike and self.recipe.optimiser.skip_spikes
        if not skipped:
            self.update(gradients, norm)
            if not initialised:
                self.model.observe(scores)
            self.share_statistics()
            self.model.learn(measured)
        blocks = self.gate_lines(stats, scores, used)
        outcome = ("skipped" if skipped else "taken") if spike else None
        return StepResult(loss, self.recipe.lr.peak * lr_scale, norm, outcome, blocks)

    def micro_batches(self, step: int) -> Iterator[Windows]:
        """This rank's micro-batches of a step."""
        size = self.recipe.micro_batch
        for first in range(self.first, self.last, size):
            tokens, targets = self.source.rows(step, first, min(first + size, self.last))
            yield paired(tokens, targets, self.apart).to(self.world.device)

    def read(self, batch: Windows, target_weight: float, **more: Any) -> Output:
        """The forward over a micro-batch; target_weight: factor of each target's nll."""
        return self.forward(
            batch.tokens,
            reset=batch.reset,
            targets=batch.targets,
            target_weight=target_weight,
            **more,
        )

    def forward(self, tokens: Tensor, state: State | None = None, **more: Any) -> Output:
        """The model's forward in the precision of the recipe."""
        with autocast(self.recipe.precision, self.world.device):
            return self.model(tokens, state, **more)

    def init_gate_stats(self, batches: list[Windows]) -> bool:
        """Give gates without statistics those of the whole batch, before they decide on it.

        Returns whether there were such gates.
        """
        fresh = any(lacks_statistics(block.gate) for block in self.blocks)
        if fresh:
            stats = MicroBatchStats(self.zero())
            with torch.no_grad():
                for batch in batches:
                    stats.add(self.zero(), self.read(batch, 0.0).gates)
            self.model.observe(self.gather_scores(stats))
        return fresh

    def forward_backward(self, batches: list[Windows], step: int = 0) -> MicroBatchStats:
        """Forward and backward over the micro-batches, accumulating gradients of the local rows."""
        targets = torch.stack([(batch.targets != IGNORE).sum() for batch in batches]).sum()
        target_weight = 1 / max(int(self.world.sum(targets)), 1)
        stats = MicroBatchStats(self.zero())
        self.optimizer.zero_grad(set_to_none=True)
        first = self.first
        gates = None
        if step < self.recipe.open_steps:
            gates = [ForcedOpen(block.gate) for block in self.blocks]
        for batch in batches:
            measure = self.sample(step, range(first, first + len(batch)), batch.columns)
            options = PassOptions(gates=gates, measure=measure)
            out = self.read(batch, target_weight, options=options)
            first += len(batch)
            assert out.loss is not None
            out.loss.backward()
            stats.add(out.loss, out.gates, out.measured)
        return stats

    def share_statistics(self) -> None:
        """Give every rank rank 0's statistics of gates that update in the forward.

        Such a gate has taken in the tokens of its own rank only.
        """
        for block in self.blocks if self.world.size > 1 else ():
            if block.gate.updates_in_forward:
                statistics = self.world.broadcast(block.gate.state_dict())
                block.gate.load_state_dict(statistics, strict=False)

    def sample(self, step: int, rows: range, columns: int) -> Tensor | None:
        """[rows, S] columns at which gains are measured; None if no gate learns from gains."""
        if not self.model.measures:
            return None
        batch = self.recipe.batch
        return sampled(self.recipe.seed, step, rows, batch, columns).to(self.world.device)

    def update(self, gradients: list[Tensor], norm: float) -> None:
        """Clip the gradients, of this norm together, and let the optimiser change the weights."""
        clip = self.recipe.optimiser.clip
        if norm > clip:
            for gradient in gradients:
                gradient.mul_(clip / norm)
        self.optimizer.step()
        self.updates += 1

    def gather_scores(self, stats: MicroBatchStats) -> list[Tensor]:
        """Per block the scores of every token of the global batch [tokens], in no particular order.

        A gate sorts them.
        """
        return [self.world.gather(torch.cat(scores)) for scores in stats.scores]

    def gather_measured(self, stats: MicroBatchStats) -> list[Measured | None]:
        """Per block the measured gains of the global batch, in the order of its rows.

        So that no cut of the batch into micro-batches and ranks moves a bit of a sum.
        """
        blocks: list[Measured | None] = []
        for parts in zip(*stats.measured, strict=True):
            known = [part for part in parts if part is not None]
            if not known:
                blocks.append(None)
                continue
            x = self.world.gather(torch.cat([part.x for part in known]))
            value = self.world.gather(torch.cat([part.value for part in known]))
            blocks.append(Measured(x, value))
        return blocks or [None] * len(self.blocks)

    def zero(self) -> Tensor:
        """A float64 zero on the device."""
        return torch.zeros((), dtype=torch.float64, device=self.world.device)

    def gate_numbers(self) -> list[dict[str, float | None]]:
        """Per block the numbers its gate decides with, and alpha (the mean over channels)."""
        blocks = []
        for block in self.blocks:
            gate = block.gate.decider
            numbers = {"mu": gate.mu, "sigma": gate.sigma} if isinstance(gate, Adaptive) else {}
            numbers["tau"] = gate.threshold
            numbers["alpha"] = self.world.full_tensor(block.scale()).detach().mean()
            blocks.append({name: finite(float(value)) for name, value in numbers.items()})
        return blocks

    def gate_lines(
        self, stats: MicroBatchStats, pooled: list[Tensor], used: list[dict[str, float | None]]
    ) -> tuple[GateLine, ...]:
        """Per block: fraction of tokens that fired, numbers that decided, 10th and 90th percentile
        of scores.
        """
        if not used:
            return ()
        fired = self.world.sum(torch.stack(stats.fired)) / self.recipe.step_tokens
        lines = []
        for rate, scores, numbers in zip(fired.tolist(), pooled, used, strict=True):
            last, ordered = scores.numel() - 1, scores.sort().values
            low, high = (finite(float(ordered[k])) for k in (last // 10, last * 9 // 10))
            lines.append(GateLine(fire=rate, score_10=low, score_90=high, **numbers))
        return tuple(lines)


def boundary(documents: str, end_of_text: int | None) -> int | None:
    """The token that ends a document if documents are kept apart (Recipe.documents); else None."""
    if documents == "joined":
        return None
    if end_of_text is None:
        raise AmorError(
            'documents = "apart" needs to know the end-of-text token, and this data does not say it'
        )
    return end_of_text


def check_precision(precision: str, device: torch.device) -> None:
    """Refuse bf16 on a CPU under any other name than "bf16-cpu"."""
    if precision == "bf16" and device.type == "cpu":
        raise AmorError(
            'precision = "bf16" on a CPU: without bf16 units it is slower than float32 and '
            "less exact; "
            'use --set precision=float32, or "bf16-cpu" to have it all the same'
        )
    if precision == "bf16-cpu" and device.type != "cpu":
        raise AmorError(
            f'precision = "bf16-cpu" is for a CPU, and this is {device.type}; use "bf16"'
        )


def autocast(precision: str, device: torch.device) -> AbstractContextManager[Any]:
    """The context in which the forward runs: bfloat16 autocast, or nothing for float32."""
    return nullcontext() if precision == "float32" else torch.autocast(device.type, torch.bfloat16)
