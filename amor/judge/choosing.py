"""Which gate score finds the tokens that are worth firing: other gates before the same attention,
at equal firing rates.

The weights stay and the gates are replaced. In every block a gate fires on the tokens of its
highest scores, on exactly the fraction `rate` of the tokens. Gates that predict the gain are fitted
on other text, on which the model's own gates decide.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from amor.data.loader import Windows
from amor.judge.fitting import collect, fit, with_gates
from amor.judge.gates import own_gates
from amor.judge.loop import ignore_tokens
from amor.judge.policies import PolicyEvaluator
from amor.judge.value import saving
from amor.judge.windows import about
from amor.models.amor import Amor
from amor.records.value import Choice, Choosing

RATES = (0.05, 0.1, 0.22, 0.44)
EVERY = 2  # one of so many columns of `fit_text` is measured; neighbouring ones add little
PAPER = "entropy of what a block reads"
ENTROPY, GAIN = (
    {"gate": "router", "gate_options": {"target": target}} for target in ("entropy", "gain")
)
LINEAR = {"gate": "gain", "gate_options": {"explore": 1}}
# name in tables -> keys of `blocks` in a config
WAYS: dict[str, dict[str, Any]] = {
    PAPER: {"gate": "entropy", "probe": "block", "decide": "each"},
    "the same, once for all blocks": {"gate": "entropy", "probe": "block", "decide": "once"},
    "entropy of the output's vector": {"gate": "entropy", "probe": "final", "decide": "each"},
    "margin of what a block reads": {"gate": "margin", "probe": "block", "decide": "each"},
    "gain by a linear map, once for all blocks": LINEAR | {"decide": "once"},
    "entropy by a network (router)": ENTROPY | {"decide": "each"},
    "gain by a network (router)": GAIN | {"decide": "each"},
    "gain by a network (router), once for all blocks": GAIN | {"decide": "once"},
}


def compare_gates(
    model: Amor,
    windows: Windows,
    fit_text: Windows,
    rates: Sequence[float] = RATES,
    on_tokens: Callable[[int], None] = ignore_tokens,  # called with the number of tokens read
    ways: Mapping[str, Mapping[str, Any]] = WAYS,
    extra: Mapping[str, Amor] | None = None,  # more rows: the same weights behind other gates
) -> Choosing:
    """What each gate saves on held-out windows at each firing rate, fitted on `fit_text`."""
    plain = PolicyEvaluator(model, windows, own_gates(model), on_tokens=on_tokens)
    own_nll, _, _, gain = plain.with_own_gates()
    models = with_other_gates(model, fit_text, ways, on_tokens) | dict(extra or {})
    readers = {
        name: replace(plain, model=other, gates=own_gates(other)) for name, other in models.items()
    }
    nll: dict[str, list[Tensor]] = {name: [] for name in ("chance", *readers, "oracle")}
    for rate in rates:
        mask = plain.by_count(rate, seed=0)
        nll["chance"].append(plain.random(mask, 2, seed=0))
        for name, reader in readers.items():
            nll[name].append(reader.nll_with_mask(reader.top_fraction(rate)))
        nll["oracle"].append(plain.nll_with_mask(plain.same_count(gain[0], mask)))
    closed, choices = plain.nll_closed, []
    for name, each in nll.items():
        levels = tuple(saving(closed, one) for one in each)
        over_paper = tuple(saving(paper, one) for paper, one in zip(nll[PAPER], each, strict=True))
        choices.append(Choice(name=name, levels=levels, over_paper=over_paper))
    return Choosing(
        model=model.config.name,
        data=about(windows),
        rates=tuple(rates),
        own=saving(closed, own_nll),
        always=saving(closed, plain.nll_open),
        choices=tuple(choices),
    )


def tokens_read(
    model: Amor,
    windows: Windows,
    fit_text: Windows,
    ways: Mapping[str, Mapping[str, Any]] = WAYS,
    extra: int = 0,
) -> int:
    """How many tokens `compare_gates` reads, at the default rates; extra: more rows."""
    once = model.config.blocks.decide == "once"
    reads = passes(len(model.blocks), once, ways=len(ways) + extra)
    return reads * windows.tokens.numel() + learning_passes(ways) * fit_text.tokens.numel()


def learning_passes(ways: Mapping[str, Mapping[str, Any]] = WAYS) -> int:
    """How often `fit_text` is read."""
    return sum(keys["gate"] in ("gain", "router") for keys in ways.values())


def passes(blocks: int, once: bool, rates: int = len(RATES), ways: int = len(WAYS)) -> int:
    """How often the held-out windows are read; once: one gate and one oracle for all blocks."""
    return 3 + rates * (2 + ways * (blocks + 1) + (1 if once else blocks))


def with_other_gates(
    model: Amor,
    text: Windows,
    ways: Mapping[str, Mapping[str, Any]],
    on_tokens: Callable[[int], None] = ignore_tokens,
) -> dict[str, Amor]:
    """One model per way: the same weights behind other gates, fitted on the text."""
    models = {}
    for name, keys in ways.items():
        if keys["gate"] == "router":
            options, decide = dict(keys["gate_options"]), str(keys["decide"])
            other, _ = fit(model, text, options, decide, RATES[-1], EVERY, on_tokens=on_tokens)
        else:
            changes = {"gate_options": {}, **keys}
            other = with_gates(model, {f"blocks.{key}": each for key, each in changes.items()})
            if other.measures:
                other.learn(collect(other, model, text, EVERY, on_tokens))
        models[name] = other
    return models
