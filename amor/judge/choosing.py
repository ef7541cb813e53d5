"""Which score finds the tokens that are worth firing: several gates in front of the same attention, at equal firing rates.

The weights are taken as they are and the gates exchanged. In every block a gate fires on the tokens of its highest scores,
on exactly the share asked for. The gain is predicted by a regression that other text is measured for, with the model's own gates
deciding there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from amor.data.loader import Windows
from amor.judge.fitting import collect, fit, regated
from amor.judge.gates import own_gates
from amor.judge.policies import Reader
from amor.judge.resample import mean
from amor.judge.value import by_count, random, same_count
from amor.judge.windows import about
from amor.models.amor import Amor
from amor.records.value import Choice, Choosing, Saving

RATES = (0.05, 0.1, 0.22, 0.44)
EVERY = 2  # columns of the text that is learned from: one of so many is measured
PAPER = "entropy of what a block reads"
# what chooses -> keys of blocks
WAYS: dict[str, dict[str, Any]] = {
    PAPER: {"gate": "entropy", "probe": "block", "decide": "each"},
    "the same, once for all blocks": {"gate": "entropy", "probe": "block", "decide": "once"},
    "entropy of the output's vector": {"gate": "entropy", "probe": "final", "decide": "each"},
    "margin of what a block reads": {"gate": "margin", "probe": "block", "decide": "each"},
    "gain by a linear map, once for all blocks": {"gate": "gain", "decide": "once", "gate_options": {"explore": 1}},
    "entropy by a network (router)": {"gate": "router", "decide": "each", "gate_options": {"target": "entropy"}},
    "gain by a network (router)": {"gate": "router", "decide": "each", "gate_options": {"target": "gain"}},
    "gain by a network (router), once for all blocks": {"gate": "router", "decide": "once", "gate_options": {"target": "gain"}},
}


def choosing(
    model: Amor,
    windows: Windows,
    learned_from: Windows,
    rates: Sequence[float] = RATES,
    seen: Callable[[int], None] = lambda tokens: None,  # called with how many tokens were read
    ways: Mapping[str, Mapping[str, Any]] = WAYS,
    extra: Mapping[str, Amor] | None = None,  # more rows: the same weights behind other gates
) -> Choosing:
    """What every way of choosing saves on windows of held-out text; `learned_from`: text that gates learn from."""
    plain = Reader(model, windows, own_gates(model), seen=seen)
    decided, _, _, gain = plain.as_it_is()
    readers = {
        name: Reader(other, windows, own_gates(other), seen=seen, residuals=plain.residuals)
        for name, other in (exchanged(model, learned_from, ways, seen) | dict(extra or {})).items()
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


def lessons(ways: Mapping[str, Mapping[str, Any]] = WAYS) -> int:
    """How often the text that gates learn from is read."""
    return sum(keys["gate"] in ("gain", "router") for keys in ways.values())


def saved(than: Tensor, nll: Tensor) -> Saving:
    """How many nats a token less than another choice, [n, T] each."""
    less, error = mean(than - nll)
    return Saving(saved=less, se=error)


def passes(blocks: int, once: bool, rates: int = len(RATES), ways: int = len(WAYS)) -> int:
    """How often held-out windows are read. once: one gate of the model decides for all blocks, and so does the oracle."""
    return 3 + rates * (2 + ways * (blocks + 1) + (1 if once else blocks))


def exchanged(
    model: Amor, text: Windows, ways: Mapping[str, Mapping[str, Any]], seen: Callable[[int], None] = lambda tokens: None
) -> dict[str, Amor]:
    """The same weights behind other gates, one model for every way; those that predict have learned it on the text."""
    models = {}
    for name, keys in ways.items():
        if keys["gate"] == "router":
            options, decide = dict(keys["gate_options"]), str(keys["decide"])
            models[name] = fit(model, text, options, decide, RATES[-1], EVERY, seen=seen)[0]
            continue
        other = regated(model, {f"blocks.{key}": value for key, value in ({"gate_options": {}} | dict(keys)).items()})
        if other.measures:
            other.learn(collect(other, model, text, EVERY, seen))
        models[name] = other
    return models
