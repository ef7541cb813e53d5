"""Which score finds the tokens that are worth firing: several gates in front of the same attention, at equal firing rates.

The weights are taken as they are and the gates exchanged. In every block a gate fires on the tokens of its highest scores,
on exactly the share asked for. The gain is predicted by a regression that other text is measured for, with the model's own gates
deciding there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from amor.data.loader import Windows
from amor.judge.gates import own_gates
from amor.judge.loop import ROWS, read
from amor.judge.policies import Reader
from amor.judge.resample import mean
from amor.judge.value import by_count, random, same_count
from amor.judge.windows import about
from amor.models.amor import Amor, Output
from amor.models.build import build
from amor.records.value import Choice, Choosing, Saved

RATES = (0.05, 0.1, 0.22, 0.44)
EVERY = 4  # columns of the text that is learned from: one of so many is measured
PAPER = "entropy of what a block reads"
# what chooses -> keys of blocks
WAYS: dict[str, dict[str, Any]] = {
    PAPER: {"gate": "entropy", "probe": "block", "decide": "each"},
    "the same, once for all blocks": {"gate": "entropy", "probe": "block", "decide": "once"},
    "entropy of the output's vector": {"gate": "entropy", "probe": "final", "decide": "each"},
    "margin of what a block reads": {"gate": "margin", "probe": "block", "decide": "each"},
    "predicted gain, once for all blocks": {"gate": "gain", "decide": "once", "gate_options": {"explore": 1}},
}


def choosing(
    model: Amor,
    windows: Windows,
    learned_from: Windows,
    rates: Sequence[float] = RATES,
    seen: Callable[[int], None] = lambda tokens: None,  # told how many tokens were read
) -> Choosing:
    """What every way of choosing saves on windows of held-out text; `learned_from`: text the gain is learned on."""
    plain = Reader(model, windows, own_gates(model), seen=seen)
    decided, _, _, gain = plain.as_it_is()
    readers = {
        name: Reader(other, windows, own_gates(other), seen=seen, residuals=plain.residuals)
        for name, other in regated(model, learned_from, seen).items()
    }
    nll: dict[str, list[Tensor]] = {name: [] for name in ("chance", *readers, "oracle")}
    for rate in rates:
        marks = by_count(plain, rate, seed=0)
        nll["chance"].append(random(plain, marks, 2, seed=0))
        for name, reader in readers.items():
            nll[name].append(reader.told(reader.highest(rate)))
        nll["oracle"].append(plain.told(same_count(plain, gain[0], marks)))
    choices = tuple(
        Choice(
            name=name,
            levels=tuple(saved(plain.closed, one) for one in each),
            over_paper=tuple(saved(paper, one) for paper, one in zip(nll[PAPER], each, strict=True)),
        )
        for name, each in nll.items()
    )
    own, always = (saved(plain.closed, one) for one in (decided, plain.opened))
    return Choosing(model=model.config.name, data=about(windows), rates=tuple(rates), own=own, always=always, choices=choices)


def saved(than: Tensor, nll: Tensor) -> Saved:
    """How many nats a token less than another choice, [n, T] each."""
    less, error = mean(than - nll)
    return Saved(saved=less, se=error)


def passes(blocks: int, once: bool, rates: int = len(RATES)) -> int:
    """How often held-out windows are read. once: one gate of the model decides for all blocks, and so does the oracle."""
    return 3 + rates * (2 + len(WAYS) * (blocks + 1) + (1 if once else blocks))


def regated(model: Amor, text: Windows, seen: Callable[[int], None] = lambda tokens: None) -> dict[str, Amor]:
    """The same weights behind other gates, one model for every way; those that predict gains have learned them on the text."""
    weights = {name: held for name, held in model.state_dict().items() if ".gate." not in name}
    found = {}
    for name, keys in WAYS.items():
        config = model.config.change(**{f"blocks.{key}": value for key, value in ({"gate_options": {}} | keys).items()})
        other = build(config).to(model.embed.weight)
        other.load_state_dict(weights, strict=False)
        if other.measures:
            acquaint(other.eval(), model, text, seen)
        found[name] = other.eval()
    return found


def acquaint(other: Amor, model: Amor, text: Windows, seen: Callable[[int], None]) -> None:
    """Let the gates of `other` learn what firing saves on a text, the gates of `model` deciding there."""
    columns = torch.arange(0, text.columns, EVERY)

    def measuring(*given: Any, **more: Any) -> Output:
        return other(*given, measure=columns.expand(len(given[0]), -1), **more)

    for said in read(other, text, rows=ROWS, gates=own_gates(model), forward=measuring, seen=seen):
        other.learn(said.out.measured)
