"""Losses at equal firing rates: the model's own gate, chance and the oracle, all on the same
windows.

A gate fires on the tokens of its highest scores, in every block on exactly the share that is given:
its threshold is set on the text itself, without a look at what comes next. Block by block, because
a firing changes what later blocks read.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from msgspec import Meta

from amor import typed
from amor.measures.base import RATES, MeasureKind, Rates, TextOptions
from amor.records import Number, Record, Words
from amor.records.value import TextSource
from amor.study.cells import best_cell, grid_cell, mean_cell, notes, study_table
from amor.study.paired import Grid
from amor.study.table import Cell, Table, TableRow

if TYPE_CHECKING:
    from torch import Tensor

    from amor.experiment.subject import FinishedRun
    from amor.judge.policies import PolicyEvaluator
    from amor.study.results import Results


class RatesOptions(TextOptions, frozen=True):
    """Which windows are read, and the firing rates that are compared."""

    rates: Rates = RATES
    draws: Annotated[int, Meta(ge=1, le=1000)] = 2  # random choices of tokens that are averaged


class RatePolicy(Record, frozen=True):
    """A choice of tokens: its loss in every window, and how often each block fired."""

    # which tokens fire; "as it is": by the thresholds of the model folder
    name: Literal["never", "always", "as it is", "gate", "random", "oracle"]
    rate: typed.Share | None  # the rate it was set to; None: it has its own
    fire: tuple[typed.Share, ...]  # one per block
    nll: Number  # nats per token
    windows: tuple[Number, ...]  # nats per token of each window


class RatesResult(Record, frozen=True):
    """Policies at equal firing rates; `notes` say why a gate has none."""

    gate: Words
    data: TextSource
    policies: tuple[RatePolicy, ...]
    notes: tuple[Words, ...]


class RatesMeasure(MeasureKind):
    """Loss of the gate, of chance and of the oracle at equal firing rates."""

    kind = "rates"
    Options, Result = RatesOptions, RatesResult
    needs_gates = needs_text = True

    @staticmethod
    def measure(subject: FinishedRun, options: RatesOptions) -> RatesResult:
        """Evaluate every policy at every rate on the same windows."""
        import torch

        from amor.judge.gates import own_gates
        from amor.judge.policies import PolicyEvaluator
        from amor.judge.value import all_aimed
        from amor.judge.windows import about

        windows = subject.windows(options)
        reader = PolicyEvaluator(subject.model, windows, own_gates(subject.model))
        nll, fire, _, gain = reader.with_own_gates()
        trouble = {words for rate in options.rates if (words := all_aimed(reader.gates, rate)[1])}
        policies = [
            _policy("never", None, reader.nll_closed, torch.zeros_like(fire)),
            _policy("always", None, reader.nll_open, torch.ones_like(fire)),
            _policy("as it is", None, nll, fire),
        ]
        for rate in options.rates:
            policies += _at_rate(reader, gain[0], rate, options.draws, aims=not trouble)
        return RatesResult(
            gate=reader.gates[0].kind,
            data=about(windows),
            policies=tuple(policies),
            notes=tuple(sorted(trouble)),
        )

    @staticmethod
    def table(results: Results) -> Table:
        """Nats saved at equal firing rates; gates are compared with gates."""
        rates = results.options("rates").rates
        columns = (
            *(f"at {100 * rate:g} %" for rate in rates),
            "as trained",
            "fires, %",
            "everywhere",
        )
        gated, lines = results.by_row("rates"), []
        for row, seeds in gated.items():
            cells: dict[str, list[Cell | None]] = {"gate": []}
            for rate in rates:
                rivals = {other: saved(results, other, "gate", rate) for other in gated}
                cells["gate"].append(best_cell(row, rivals, sign=-1))
            own, always = (grid_cell(saved(results, row, end)) for end in ("as it is", "always"))
            policies = [policy for each in seeds for policy in each.policies]
            fires = [rate for p in policies if p.name == "as it is" for rate in p.fire]
            cells["gate"] += [own, mean_cell((100 * rate for rate in fires), 1), always]
            for name in ("random", "oracle"):
                levels = [grid_cell(saved(results, row, name, rate)) for rate in rates]
                cells[name] = [*levels, None, None, None]
            lines += [TableRow(f"{row}: {name}", tuple(c)) for name, c in cells.items() if any(c)]
        why = {f"{row}: {n}" for row, seeds in gated.items() for each in seeds for n in each.notes}
        meaning = (
            "nats per token saved over never firing, on held-out text; a gate fires on its "
            "highest scores"
        )
        remarks = (meaning, *sorted(why), *notes(results, "rates"))
        return study_table(results, "equal firing rates", "policy", columns, lines, *remarks)


def _at_rate(
    reader: PolicyEvaluator, first: Tensor, rate: float, draws: int, aims: bool
) -> Iterator[RatePolicy]:
    """first: the gain of the first block, per token [n, T]; aims: whether the gate can be set to a
    rate."""
    marks = reader.top_fraction(rate) if aims else reader.by_count(rate, seed=0)
    if aims:
        yield _policy("gate", rate, reader.nll_with_mask(marks), marks)
    yield _policy("random", rate, reader.random(marks, draws, seed=0), marks)
    oracle = reader.same_count(first, marks)
    yield _policy("oracle", rate, reader.nll_with_mask(oracle), oracle)


def _policy(name: str, rate: float | None, nll: Tensor, fire: Tensor) -> RatePolicy:
    each = nll.double().mean(1)
    return RatePolicy(
        name=name,  # type: ignore[arg-type]
        rate=rate,
        fire=tuple(fire.double().mean((1, 2)).tolist()),
        nll=float(each.mean()),
        windows=tuple(each.tolist()),
    )


def policy_losses(results: Results, row: str, name: str, rate: float | None = None) -> Grid | None:
    """Loss by seed and window of one row's runs under a policy."""
    windows = {
        seed: policy.windows
        for seed, each in results.of(row, "rates").items()
        for policy in each.policies
        if (policy.name, policy.rate) == (name, rate)
    }
    return results.grid(row, "rates", windows)


def saved(results: Results, row: str, name: str, rate: float | None = None) -> Grid | None:
    """What a policy saves over never firing, by seed and window."""
    never, mine = policy_losses(results, row, "never"), policy_losses(results, row, name, rate)
    return None if never is None or mine is None else never.less(mine)
