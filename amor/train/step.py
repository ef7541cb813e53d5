"""One optimiser step: micro-batches forward and backward, one clipped update, and what the gates learn from it.

Gate statistics: every gate decides with the numbers from before the step, and takes in the scores of the whole global
batch once, after it. In the very first step there are none yet: a pass without gradient meets the batch first, the step
decides with those, and nothing is taken in a second time. Blocks start as no-ops, so the scores of that pass are the
scores of the step.

In the first `open_steps` of a recipe gates decide nothing: blocks fire everywhere, and gates take in what they would have scored.

Gates that learn from gains have them measured on a sample of the step's tokens (amor/train/sample.py), and take them in with
the scores.
"""

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from amor.data.loader import Source, Windows, paired
from amor.errors import AmorError
from amor.gates.base import Adaptive
from amor.gates.warmup import Opened
from amor.models.amor import Amor, Output
from amor.models.block import Block, Trace
from amor.models.measure import Measured
from amor.numbers import finite
from amor.ops.head import IGNORE
from amor.records.run import GateLine
from amor.state import State
from amor.train.distributed import World
from amor.train.optim import set_rate
from amor.train.recipe import Recipe
from amor.train.sample import sampled
from amor.train.schedule import shape
from amor.train.trouble import NonFiniteError, Spikes


@dataclass
class MicroBatchStats:
    """What the micro-batches of a step have shown so far; a list a block."""

    loss: Tensor
    scores: list[list[Tensor]] = field(default_factory=list)
    fired: list[Tensor] = field(default_factory=list)
    measured: list[tuple[Measured | None, ...]] = field(default_factory=list)  # a micro-batch

    def add(self, loss: Tensor, gates: tuple[Trace, ...], measured: tuple[Measured | None, ...] = ()) -> None:
        self.measured.append(measured)
        self.loss = self.loss + loss.detach().double()
        if not self.scores:
            self.scores, self.fired = [[] for _ in gates], [torch.zeros_like(self.loss) for _ in gates]
        for block, gate in enumerate(gates):
            self.scores[block].append(gate.score.flatten())
            self.fired[block] += gate.fire.sum()


@dataclass(frozen=True)
class StepResult:
    """One optimiser step: its loss and gradient norm, both finite, its learning rate, and what the gates did."""

    loss: float
    lr: float
    norm: float
    spike: str | None  # "taken" or "skipped", where the norm was one
    blocks: tuple[GateLine, ...]


class Stepper:
    """Takes optimiser steps with a model, an optimiser and a source of batches."""

    def __init__(
        self,
        model: Amor,
        optimizer: torch.optim.Optimizer,
        recipe: Recipe,
        source: Source,
        world: World,
        end_of_text: int | None = None,
    ):
        self.model, self.optimizer, self.recipe, self.source, self.world = model, optimizer, recipe, source, world
        self.apart = boundary(recipe.documents, end_of_text)
        self.spikes = Spikes(recipe.optimiser.spike)
        self.updates = 0  # optimiser steps that changed the weights
        self.first, self.last = world.local_rows(recipe.batch)
        check_precision(recipe.precision, world.device)

    def __call__(self, step: int) -> StepResult:
        """Take step number `step` (the first is 0); what it found, or NonFiniteError before anything is changed."""
        lr_scale = shape(step, self.recipe.total_steps, self.recipe.lr)
        set_rate(self.optimizer, lr_scale)
        pieces = list(self.micro_batches(step))
        fresh = self.init_gate_stats(pieces)
        used = self.gate_numbers()
        stats = self.forward_backward(pieces, step)
        self.world.reduce_gradients(self.model)
        norm = self.gradient_norm()
        loss = float(self.world.sum(stats.loss))
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise NonFiniteError(step, loss, norm)
        pooled, measured = self.gather_scores(stats), self.all_measured(stats)
        spike = self.spikes.meets(norm)
        skipped = spike and self.recipe.optimiser.skip_spikes
        if not skipped:
            self.update(norm)
            if not fresh:
                self.model.observe(pooled)
            self.share_statistics()
            self.model.learn(measured)
        blocks = self.gate_lines(stats, pooled, used)
        told = ("skipped" if skipped else "taken") if spike else None
        return StepResult(loss, self.recipe.lr.peak * lr_scale, norm, told, blocks)

    def micro_batches(self, step: int) -> Iterator[Windows]:
        """This process's micro-batches of a step."""
        for first in range(self.first, self.last, self.recipe.micro_batch):
            tokens, targets = self.source.rows(step, first, min(first + self.recipe.micro_batch, self.last))
            yield paired(tokens, targets, self.apart).to(self.world.device)

    def read(self, part: Windows, target_weight: float, **more: Any) -> Output:
        """A micro-batch, every target weighed so in the loss."""
        return self.forward(part.tokens, reset=part.reset, targets=part.targets, share=target_weight, **more)

    def forward(self, tokens: Tensor, state: State | None = None, **more: Any) -> Output:
        """The model's forward in the precision of the recipe."""
        with autocast(self.recipe.precision, self.world.device):
            return self.model(tokens, state, **more)

    def init_gate_stats(self, pieces: list[Windows]) -> bool:
        """Show gates that have met nothing the whole batch, before they decide on it; whether there were any."""
        fresh = any(
            isinstance(b.gate, Adaptive) and not b.gate.updates_in_forward and int(b.gate.updates) == 0 for b in self.blocks()
        )
        if fresh:
            stats = MicroBatchStats(self.nothing())
            with torch.no_grad():
                for part in pieces:
                    stats.add(self.nothing(), self.read(part, 0.0).gates)
            self.model.observe(self.gather_scores(stats))
        return fresh

    def forward_backward(self, pieces: list[Windows], step: int = 0) -> MicroBatchStats:
        """Forward and backward over the micro-batches: gradients, scores and measured gains of the whole batch."""
        scored = self.world.sum(torch.stack([(p.targets != IGNORE).sum() for p in pieces]).sum())
        target_weight = 1 / max(int(scored), 1)
        stats = MicroBatchStats(self.nothing())
        self.optimizer.zero_grad(set_to_none=True)
        first = self.first
        gates = [Opened(block.gate) for block in self.blocks()] if step < self.recipe.open_steps else None
        for part in pieces:
            measure = self.sample(step, range(first, first + len(part)), part.columns)
            out = self.read(part, target_weight, measure=measure, gates=gates)
            first += len(part)
            assert out.loss is not None
            out.loss.backward()
            stats.add(out.loss, out.gates, out.measured)
        return stats

    def share_statistics(self) -> None:
        """Gates that update in the forward have seen the tokens of their own rank: rank 0's statistics become everyone's."""
        for block in self.blocks() if self.world.size > 1 else ():
            if block.gate.updates_in_forward:
                block.gate.load_state_dict(self.world.broadcast(block.gate.state_dict()), strict=False)

    def sample(self, step: int, rows: range, columns: int) -> Tensor | None:
        """Where gains are measured; nowhere, if no gate asks."""
        if not self.model.measures:
            return None
        return sampled(self.recipe.seed, step, rows, self.recipe.batch, columns).to(self.world.device)

    def gradient_norm(self) -> float:
        self.gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        return float(self.world.full_tensor(torch.nn.utils.get_total_norm(self.gradients)))

    def update(self, norm: float) -> None:
        clip = self.recipe.optimiser.clip
        if norm > clip:
            for gradient in self.gradients:
                gradient.mul_(clip / norm)
        self.optimizer.step()
        self.updates += 1

    def gather_scores(self, stats: MicroBatchStats) -> list[Tensor]:
        """Scores of every token of the global batch, in no particular order: a gate sorts them."""
        return [self.world.gather(torch.cat(scores)) for scores in stats.scores]

    def all_measured(self, stats: MicroBatchStats) -> list[Measured | None]:
        """A block: the sample of the global batch, in the order of its rows, so that no cut of it moves a bit of a sum."""
        found: list[Measured | None] = []
        for parts in zip(*stats.measured, strict=True):
            known = [part for part in parts if part is not None]
            joined = [self.world.gather(torch.cat([getattr(part, name) for part in known])) for name in ("x", "value") if known]
            found.append(Measured(*joined) if known else None)
        return found or [None] * len(self.blocks())

    def nothing(self) -> Tensor:
        return torch.zeros((), dtype=torch.float64, device=self.world.device)

    def gate_numbers(self) -> list[dict[str, float | None]]:
        """A block: what its gate decides with (threshold tau), and how wide it is open (alpha, the mean over channels)."""
        found = []
        for block in self.blocks():
            gate = block.gate.decider
            numbers = {"mu": gate.mu, "sigma": gate.sigma} if isinstance(gate, Adaptive) else {}
            numbers |= {"tau": gate.threshold, "alpha": self.world.full_tensor(block.scale()).detach().mean()}
            found.append({name: finite(float(value)) for name, value in numbers.items()})
        return found

    def gate_lines(
        self, stats: MicroBatchStats, pooled: list[Tensor], used: list[dict[str, float | None]]
    ) -> tuple[GateLine, ...]:
        """A block: the share of tokens that fired, the numbers that decided, and where 10 % and 90 % of the scores lie."""
        if not used:
            return ()
        fired = self.world.sum(torch.stack(stats.fired)) / self.recipe.step_tokens
        found = []
        for rate, scores, numbers in zip(fired.tolist(), pooled, used, strict=True):
            last, ordered = scores.numel() - 1, scores.sort().values
            low, high = (finite(float(ordered[place])) for place in (last // 10, last * 9 // 10))
            found.append(GateLine(fire=rate, score_10=low, score_90=high, **numbers))
        return tuple(found)

    def blocks(self) -> list[Block]:
        return list(self.model.blocks)  # type: ignore[arg-type]


def boundary(documents: str, end_of_text: int | None) -> int | None:
    """The token that ends a document, where documents stand apart."""
    if documents == "joined":
        return None
    if end_of_text is None:
        raise AmorError('documents = "apart" needs to know the end-of-text token, and this data does not say it')
    return end_of_text


def check_precision(precision: str, device: torch.device) -> None:
    """bf16 is for GPUs; on a CPU it must be asked for by name."""
    if precision == "bf16" and device.type == "cpu":
        raise AmorError(
            'precision = "bf16" on a CPU: without bf16 units it is slower than float32 and less exact; '
            'use --set precision=float32, or "bf16-cpu" to have it all the same'
        )
    if precision == "bf16-cpu" and device.type != "cpu":
        raise AmorError(f'precision = "bf16-cpu" is for a CPU, and this is {device.type}; use "bf16"')


def autocast(precision: str, device: torch.device) -> AbstractContextManager[Any]:
    return nullcontext() if precision == "float32" else torch.autocast(device.type, torch.bfloat16)
