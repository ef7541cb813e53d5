"""What a gate is worth: the gain of firing at a token, and how near the gate comes to the best
choice of tokens.

Every policy is evaluated on the same windows. `never` closes all blocks and `always` opens them;
`gate` is the model as it is; `random` gives the gate's decisions to other tokens; `oracle` fires as
often as the gate in every block, but on the tokens with the largest gain; `oracle_free` fires
wherever the gain is positive. Errors are bootstrapped over windows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import torch
from torch import Tensor

from amor.data.loader import Windows
from amor.errors import AmorError
from amor.gates import override
from amor.gates.base import Gate
from amor.judge.gates import own_gates
from amor.judge.loop import ROWS, check_finite, ignore_tokens
from amor.judge.policies import PolicyEvaluator, largest
from amor.judge.resample import mean, ratio
from amor.judge.windows import about
from amor.models.amor import Amor
from amor.numbers import finite
from amor.records import value as records
from amor.records.value import Level, PolicyLoss, Value

RATES = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.6, 0.8, 1.0)
DRAWS = 2  # random choices averaged where a choice must be run again
BINS = 10
# FLOPs per minute of two laptop cores, by a model of 1.8 M parameters (1.8e10 per second)
MINUTE = 1e12
# what is exact of the results
ONE_BLOCK = (
    "One block: the loss of every choice of tokens follows exactly from two passes, all closed and "
    "all open."
)
RUN_AGAIN = (
    "a firing changes what later blocks read and remember, so every choice was run again. The "
    "oracle chooses {}: a better choice may exist."
)
MORE_BLOCKS = RUN_AGAIN.format("block after block, judging each with the later ones closed")
ONE_GATE = RUN_AGAIN.format("by the gain of all blocks where every token fires")


def passes(blocks: int, rates: int = len(RATES), draws: int = DRAWS, once: bool = False) -> int:
    """How often the windows are read: open, closed and as they are; then the choices that must be
    run again.

    once: one gate decides for all blocks, and an oracle needs one pass instead of one per block.
    """
    oracle = 1 if once else blocks
    return 3 + rates if blocks == 1 else 3 + (draws + 2 * oracle) + rates * (1 + draws + oracle)


def passes_of(model: Amor) -> int:
    """`passes` of a model, by default rates and draws."""
    once = len(model.blocks) > 1 and model.config.blocks.decide == "once"
    return passes(len(model.each_block()), once=once)


def affordable_windows(model: Amor, context: int, most: int = 32) -> int:
    """How many windows of `context` tokens `value` reads in about a minute on a laptop: 4 to
    `most`, by the FLOPs of all passes."""
    flops = passes_of(model) * context * model.cost(context // 2).flops
    return max(4, min(most, int(MINUTE / max(flops, 1))))


def value(
    model: Amor,
    windows: Windows,
    gates: Sequence[Gate] | None = None,  # to be evaluated, one per block; None: the model's own
    rates: Sequence[float] = RATES,
    draws: int = DRAWS,
    seed: int = 0,
    rows: int = ROWS,  # windows per forward call
    on_tokens: Callable[[int], None] = ignore_tokens,  # called with the number of tokens read
) -> Value:
    """Gate value accounting on windows of held-out text."""
    gates = own_gates(model) if gates is None else gates
    reader = PolicyEvaluator(model, windows, gates, rows, on_tokens)
    nll, fire, entropy, gain = reader.with_own_gates()
    closed, opened = reader.nll_closed, reader.nll_open
    check_finite(model, closed, opened, nll)
    by_chance = reader.random(fire, draws, seed)
    oracle = reader.same_count(gain[0], fire)
    free = reader.oracle(gain[0], lambda k, g: g > 0)
    gate = msgspec.structs.asdict(loss(nll, fire, closed))
    points, notes = curve(reader, gain[0], rates, draws, seed)
    note = ONE_BLOCK
    if reader.blocks > 1:
        blocks = f"{reader.blocks} blocks"
        note = (
            f"{blocks} behind one gate: {ONE_GATE}" if reader.once else f"{blocks}: {MORE_BLOCKS}"
        )
    each = [gains(f"block {k}", g, h) for k, (g, h) in enumerate(zip(gain, entropy))]
    return Value(
        model=model.config.name,
        gate=reader.gates[0].kind,
        blocks=reader.blocks,
        data=about(windows),
        exact=reader.blocks == 1,
        notes=(note, *notes),
        losses=records.Policies(
            never=loss(closed, torch.zeros_like(fire), closed),
            gate=records.GatePolicy(over_random_se=mean(by_chance - nll)[1], **gate),
            always=loss(opened, torch.ones_like(fire), closed),
            random=loss(by_chance, fire, closed),
            oracle=loss(reader.nll_with_mask(oracle), oracle, closed),
            oracle_free=loss(reader.nll_with_mask(free), free, closed),
        ),
        gains=(*each, gains("all blocks", closed - opened, entropy[0])),
        agreement=tuple(agreement(k, f, g) for k, (f, g) in enumerate(zip(fire, gain))),
        calibration=tuple(calibration(h, g) for h, g in zip(entropy, gain)),
        curve=points,
    )


def loss(nll: Tensor, fire: Tensor, closed: Tensor) -> PolicyLoss:
    """Mean nll of a policy, and what it saves over never firing, with paired errors."""
    middle, error = mean(nll)
    saved, saved_error = mean(closed - nll)
    rates = tuple(fire.float().mean((1, 2)).tolist())
    return PolicyLoss(nll=middle, se=error, saved=saved, saved_se=saved_error, fire_rate=rates)


def saving(baseline: Tensor, nll: Tensor) -> records.Saving:
    """Nats per token below a baseline, both [n, T], with the error of the paired difference."""
    less, error = mean(baseline - nll)
    return records.Saving(saved=less, se=finite(error) or 0.0)


def gains(name: str, gain: Tensor, entropy: Tensor) -> records.Gains:
    """The distribution of a gain over tokens, and how well entropy ranks tokens by it."""
    average, error = mean(gain)
    positive, positive_error = mean((gain > 0).float())
    ordered = gain.flatten().double().sort().values
    shares = torch.tensor([0.01, 0.1, 0.5, 0.9, 0.99], dtype=torch.float64)
    quantiles = ordered[(shares * (len(ordered) - 1)).round().long()].tolist()
    return records.Gains(
        name=name,
        mean=average,
        se=error,
        positive=positive,
        positive_se=positive_error,
        quantiles=records.Quantiles(**dict(zip(("p1", "p10", "p50", "p90", "p99"), quantiles))),
        rank_correlation=rank_correlation(entropy, gain),
    )


def rank_correlation(a: Tensor, b: Tensor) -> float | None:
    """Spearman's, with average ranks for ties.

    None where one of them is the same for all tokens, as the gain of blocks that have not learned
    anything is.
    """
    from scipy.stats import spearmanr

    flat = [values.flatten().double().cpu().numpy() for values in (a, b)]
    if any((values == values[0]).all() for values in flat):
        return None
    return finite(float(spearmanr(*flat).statistic))


def agreement(block: int, fire: Tensor, gain: Tensor) -> records.Agreement:
    """The tokens a gate fires on against the tokens it should: those of the largest gains at the
    same count, and those of all gains over 0.

    At the same count precision and recall are one number; a random gate would reach the firing
    rate.
    """
    best, useful = largest(gain, int(fire.sum())), gain > 0
    ratios = {
        "best": (fire & best, best),
        "precision": (fire & useful, fire),
        "recall": (fire & useful, useful),
        "precision_by_chance": (useful, torch.ones_like(useful)),
        "captured": (gain * fire, gain * best),
    }
    rate, results = float(fire.float().mean()), dict[str, float | None]()
    for name, (top, bottom) in ratios.items():
        middle, error = ratio(top.double().sum(1), bottom.double().sum(1))
        results |= {name: finite(middle), f"{name}_se": finite(error)}
    by_chance = rate * float(gain.double().sum()) / max(float((gain * best).double().sum()), 1e-30)
    results["captured_by_chance"] = by_chance if best.any() else None
    return records.Agreement(block=block, fire_rate=rate, **results)


def calibration(entropy: Tensor, gain: Tensor) -> tuple[records.Bin, ...]:
    """Bins of equally many tokens by entropy: the mean gain in each."""
    entropy = entropy.double()
    edges = torch.linspace(0, 1, BINS + 1, dtype=torch.float64)[1:-1]
    place = torch.bucketize(entropy, entropy.flatten().quantile(edges))
    bins = []
    for number in place.unique().tolist():  # fewer than BINS where entropies are equal
        inside = place == number
        middle, error = ratio((gain * inside).sum(1), inside.sum(1))
        tokens, center = int(inside.sum()), float(entropy[inside].mean())
        bins.append(records.Bin(entropy=center, gain=middle, se=finite(error), tokens=tokens))
    return tuple(bins)


def curve(
    reader: PolicyEvaluator, first: Tensor, rates: Sequence[float], draws: int, seed: int
) -> tuple[tuple[records.Point, ...], dict[str, None]]:
    """Loss against firing rate: the gate with the threshold for a rate, then random and oracle at
    the rates it reached; and why a gate has no line, where it has none."""
    points: list[records.Point] = []
    notes: dict[str, None] = {}
    for rate in rates:
        gates, problem = all_aimed(reader.gates, rate)
        if problem:
            notes[f"{problem}; the curve has no line for the gate."] = None
        output = reader.run(gates) if gates else None
        fire = output.fire if output else reader.by_count(rate, seed)
        point = records.Point(
            aim=rate,
            fire_rate=float(fire.float().mean()),
            blocks=tuple(fire.float().mean((1, 2)).tolist()),
            gate=level(output.nll) if output else None,
            random=level(reader.random(fire, draws, seed)),
            oracle=level(reader.nll_with_mask(reader.same_count(first, fire))),
        )
        points.append(point)
    return tuple(points), notes


def level(nll: Tensor) -> Level:
    """The mean of nll per token, with its standard error."""
    middle, error = mean(nll)
    return Level(nll=middle, se=error)


def all_aimed(gates: Sequence[Gate], rate: float) -> tuple[list[Gate], str]:
    """Copies of gates set to a firing rate, or none and why not."""
    try:
        return override.all_aimed(gates, rate), ""
    except AmorError as error:
        return [], str(error)
