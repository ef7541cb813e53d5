"""Losses at equal firing rates: the model's own gate, chance and the oracle, all on the same windows.

A gate fires on the tokens of its highest scores, in every block on exactly the share asked for: its threshold is set on the text
itself, without a look at what comes next. Block by block, because a firing changes what later blocks see.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from amor.experiment.subject import Subject
from amor.judge.gates import own_gates
from amor.judge.policies import PolicyEvaluator
from amor.judge.value import all_aimed, by_count, random, same_count
from amor.judge.windows import about
from amor.records.study import AllRates, AtRates, Policy

VERSION = 1  # raised where it finds other numbers of the same run, which makes those that stand void


def judge(subject: Subject, asked: AtRates) -> AllRates:
    windows = subject.windows(asked)
    reader = PolicyEvaluator(subject.model, windows, own_gates(subject.model))
    nll, fire, _, gain = reader.with_own_gates()
    plain = {"never": (reader.nll_closed, torch.zeros_like(fire)), "always": (reader.nll_open, torch.ones_like(fire))}
    plain["as it is"] = (nll, fire)
    notes = {trouble for rate in asked.rates if (trouble := all_aimed(reader.gates, rate)[1])}
    policies = [policy(name, None, *both) for name, both in plain.items()]
    for rate in asked.rates:
        policies += at_rate(reader, gain[0], rate, asked.draws, aims=not notes)
    return AllRates(gate=reader.gates[0].kind, data=about(windows), policies=tuple(policies), notes=tuple(sorted(notes)))


def at_rate(reader: PolicyEvaluator, first: Tensor, rate: float, draws: int, aims: bool) -> Iterator[Policy]:
    marks = reader.top_fraction(rate) if aims else by_count(reader, rate, seed=0)
    if aims:
        yield policy("gate", rate, reader.nll_with_mask(marks), marks)
    yield policy("random", rate, random(reader, marks, draws, seed=0), marks)
    oracle = same_count(reader, first, marks)
    yield policy("oracle", rate, reader.nll_with_mask(oracle), oracle)


def policy(name: str, rate: float | None, nll: Tensor, fire: Tensor) -> Policy:
    each = nll.double().mean(1)
    rates = tuple(fire.double().mean((1, 2)).tolist())
    return Policy(name=name, rate=rate, fire=rates, nll=float(each.mean()), windows=tuple(each.tolist()))  # type: ignore[arg-type]
