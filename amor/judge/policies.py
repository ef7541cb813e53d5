"""The loss of a model on windows of text under any choice of the tokens that fire.

With one block, whether a token fires changes the prediction at that token and nothing else (keys
and values are always computed), so two passes, all closed and all open, give the loss of every
choice. With more blocks a firing changes what later blocks read and remember, so every choice is
run again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

import torch
from torch import Tensor

from amor.data.loader import Windows
from amor.errors import AmorError
from amor.gates.base import Gate
from amor.gates.follower import Follower
from amor.judge.gates import ForcedGate, RecordingGate, force_all
from amor.judge.loop import (
    ROWS,
    CorpusOutput,
    GateChoice,
    Place,
    Residuals,
    ignore_tokens,
    join_chunks,
    run_windows,
)
from amor.models.amor import Amor


@dataclass
class PolicyEvaluator:
    """A model and n windows of T tokens. Results are [n, T] or [K, n, T] (K blocks), on the CPU."""

    model: Amor
    windows: Windows
    gates: Sequence[Gate]  # to be evaluated, one per block
    rows: int = ROWS  # windows per forward call
    on_tokens: Callable[[int], None] = ignore_tokens  # called with the number of tokens read
    # the backbone's output, computed once for all choices
    residuals: Residuals = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.gates:
            lack = "has no gated blocks, so there is no gate to judge"
            raise AmorError(f"{self.model.config.name} {lack}; give an AMOR model")

    @property
    def blocks(self) -> int:
        """How many gated blocks the model has: K."""
        return len(self.gates)

    @property
    def once(self) -> bool:
        """Whether one gate decides for all blocks."""
        return isinstance(self.gates[-1], Follower)

    @property
    def shape(self) -> tuple[int, int, int]:
        """[K, n, T]"""
        return self.blocks, len(self.windows), self.windows.columns

    def run(self, gates: GateChoice) -> CorpusOutput:
        """All windows with these gates."""
        chunks = run_windows(
            self.model,
            self.windows,
            rows=self.rows,
            gates=gates,
            residuals=self.residuals,
            on_tokens=self.on_tokens,
        )
        return join_chunks(chunks)

    @cached_property
    def nll_closed(self) -> Tensor:
        """[n, T] nll per token with every block closed; computed at first use."""
        return self.run(force_all(self.model, False)).nll

    @cached_property
    def nll_open(self) -> Tensor:
        """[n, T] negative log-likelihood per token with every block open; computed at first use."""
        return self.run(force_all(self.model, True)).nll

    def nll_with_mask(self, fire: Tensor) -> Tensor:
        """Negative log-likelihood per token [n, T] with block k firing exactly where fire[k] is
        True ([K, n, T])."""
        if self.blocks == 1:
            return torch.where(fire[0], self.nll_open, self.nll_closed)
        return self.run(lambda place: [ForcedGate(block[place]) for block in fire]).nll

    def with_own_gates(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """With the gates to be evaluated: nll [n, T]; fire, entropy and gain [K, n, T].

        The gain of a block is the nll in nats that firing it saves at a token, with the blocks
        before it as they decided and those after it closed.
        """
        recording = [RecordingGate(gate, "entropy", "gain") for gate in self.gates]
        output = self.run(recording)
        entropy, gain = (
            torch.stack([gate.values(name, 0).cpu() for gate in recording])
            for name in ("entropy", "gain")
        )
        return output.nll, output.fire, entropy, gain

    def gain(self, block: int, fire: Tensor) -> Tensor:
        """[n, T] the gain of a block where the blocks before it fire by the mask fire [K, n, T]."""
        recording = RecordingGate(ForcedGate(False), "gain")

        def gates(place: Place) -> list[Gate]:
            before = [ForcedGate(mask[place]) for mask in fire[:block]]
            return [*before, recording, *(ForcedGate(False) for _ in fire[block + 1 :])]

        self.run(gates)
        return recording.values("gain", 0).cpu()

    def random(self, fire: Tensor, draws: int, seed: int) -> Tensor:
        """[n, T] nll with the decisions `fire` permuted over tokens: its expectation for one block,
        an average of draws for more."""
        if self.blocks == 1:
            return torch.lerp(self.nll_closed, self.nll_open, float(fire.float().mean()))
        masks = (shuffled(fire, seed + draw) for draw in range(draws))
        return torch.stack([self.nll_with_mask(mask) for mask in masks]).mean(0)

    def by_count(self, rate: float, seed: int) -> Tensor:
        """[K, n, T] a mask of a random share of tokens, the same ones in every block."""
        chance = torch.rand(self.shape[1:], generator=torch.Generator().manual_seed(seed))
        return largest(chance, round(rate * chance.numel())).expand(self.shape)

    def same_count(self, first: Tensor, fire: Tensor) -> Tensor:
        """[K, n, T] the oracle's mask: in every block as many tokens as in `fire`."""
        return self.oracle(first, lambda k, gain: largest(gain, int(fire[k].sum())))

    def oracle(self, first: Tensor, choose: Callable[[int, Tensor], Tensor]) -> Tensor:
        """[K, n, T] a mask chosen by the true gain, block after block: choose(k, gain [n, T]) ->
        mask [n, T].

        `first` is the gain of block 0, which no choice changes. Where one gate decides for all
        blocks, so does the oracle, by the gain of all blocks together.
        """
        if self.once:
            return choose(0, self.nll_closed - self.nll_open).expand(self.shape)
        fire = torch.zeros(self.shape, dtype=torch.bool)
        for k in range(self.blocks):
            fire[k] = choose(k, first if k == 0 else self.gain(k, fire))
        return fire

    def top_fraction(self, rate: float) -> Tensor:
        """[K, n, T] True at the highest scores of every block, on exactly the fraction `rate` of
        all tokens.

        Blocks are chosen in order: each score is computed with the blocks before it firing as
        chosen.
        """
        fire = torch.zeros(self.shape, dtype=torch.bool)
        for k, gate in enumerate(self.gates):
            score = self.run(partial(_one_among_forced, fire, k, gate)).score[k]
            fire[k] = largest(score, round(rate * score.numel()))
        return fire


def _one_among_forced(fire: Tensor, block: int, gate: Gate, place: Place) -> list[Gate]:
    """A gate at its block, and forced gates at all others."""
    return [gate if k == block else ForcedGate(mask[place]) for k, mask in enumerate(fire)]


def largest(values: Tensor, count: int) -> Tensor:
    """A mask of the shape of `values`, True at the `count` largest."""
    mask = torch.zeros(values.numel(), dtype=torch.bool)
    mask[values.flatten().topk(count).indices] = True
    return mask.view_as(values)


def shuffled(fire: Tensor, seed: int) -> Tensor:
    """The mask [K, n, T] with tokens permuted at random, all blocks alike."""
    order = torch.randperm(fire[0].numel(), generator=torch.Generator().manual_seed(seed))
    return fire.flatten(1)[:, order].view_as(fire)
