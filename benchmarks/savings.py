"""What each saving of the decode engine saves, beside a naive engine and the authors' method.

python -m benchmarks savings --scale 180m --rounds 8
"""

import argparse
from functools import partial
from typing import Any

from amor import typed
from amor.bench.decode import OUR_VARIANTS, OURS, ROOM, DecodePlan, options, time_decode
from amor.bench.simulate import ScheduledRounds, build_active, filled_state
from amor.bench.timing import alternate
from amor.decode.engine import Engine
from amor.decode.savings import Savings
from amor.ops.backends import kernels

ROWS = ("savings",)
EVERY = "with every saving"
AUTHORS = "the authors' method (K + 1 head evaluations, eager)"
EAGER = "reference"  # torch alone: no native code, no chunks
KINDS = {
    EVERY: Savings(),
    "no joint": Savings(joint=False),
    "no speculation": Savings(speculate=False),
    "no sparse": Savings(sparse=False),
    "not compiled": Savings(compiled=False),
}


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the suite."""
    options(parser)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """AMOR-Mamba2 at the first context and rate: its backbone, every saving switched off by itself,
    all of them off, and its variants with every saving."""
    plan = DecodePlan("savings", args)
    plan.table.request("savings")
    context, rate = plan.contexts[0], plan.rates[0]
    shape = {"scale": plan.scale, "context": context, "rate": rate}
    row = plan.table.row("savings", "product", "attend", **shape)
    model = build_active(OURS, plan.scale)
    engines = {name: Engine(model, kind) for name, kind in KINDS.items()}
    engines["backbone"] = Engine(build_active(OURS.removeprefix("amor-"), plan.scale))
    engines |= {name: Engine(build_active(name, plan.scale)) for name in OUR_VARIANTS}

    def side(name: str, rate: float, **how: bool) -> ScheduledRounds:
        engine = engines[name]
        return ScheduledRounds(engine, filled_state(engine.model, context, ROOM), rate, **how)

    compared = {"backbone": side("backbone", 0.0), EVERY: side(EVERY, rate)}
    compared["no firing"] = side(EVERY, 0.0)
    compared["blocks at different tokens"] = side(EVERY, rate, together=False)
    compared |= {name: side(name, rate) for name in OUR_VARIANTS}
    # these take turns with each other alone, and for longer
    timings = time_decode(row, compared, 2 * plan.rounds)
    others = {name: side(name, rate) for name in KINDS if name not in compared}
    timings |= time_decode(row, others, plan.rounds)
    by_torch = {
        name: ScheduledRounds(Engine(model, kind), filled_state(model, context, ROOM), rate)
        for name, kind in {"naive": Savings.none(), AUTHORS: Savings.authors()}.items()
    }

    def run_eagerly(rounds: ScheduledRounds) -> None:
        with kernels(EAGER):
            rounds.run()

    slow = {name: partial(run_eagerly, rounds) for name, rounds in by_torch.items()}
    times = alternate(slow | {EVERY: compared[EVERY].run}, plan.rounds)
    at_rate = f"at {rate:.0%} firing"
    for name, rounds in by_torch.items():
        row.times |= {name: times[name].divided(rounds.tokens)}
        other = "the naive way" if name == "naive" else name
        row.add_ratio(f"{OURS} over {other} {at_rate}", times[name], times[EVERY])
    # like with like: logits of the output on both sides
    over, taken = f"{OURS} over its backbone", row.times
    backbone = taken["backbone"]
    row.add_ratio(f"{over} {at_rate}", backbone, taken[EVERY])
    for name in OUR_VARIANTS:
        row.add_ratio(f"{name} over its backbone {at_rate}", backbone, taken[name])
    row.add_ratio(f"{over} at no firing", backbone, taken["no firing"])
    apart = "blocks at different tokens"
    row.add_ratio(f"{over} {at_rate}, {apart}", backbone, taken[apart])
    row.show()
    return plan.table.result() | plan.describe() | {"savings": typed.tree(timings)}
