"""Decode speed: tokens/s against context, firing rate, prefill, and where architectures cross.

  amor bench decode --scale 180m --contexts 3072 --json
  amor bench decode --scale 440m --contexts 3072,16384,32768,65536 --out decode.json
  amor bench decode --scale tiny --parts rows,churn,drafts
  amor bench decode --model RUN --text TEXT.txt

States are filled directly with random keys and values (reading a prompt of 64K tokens would take
hours on two cores), and gates fire by a schedule at the rate asked for; their readings of the head
run and are timed. With --model the firing rates of a trained model are measured on text, at prompt
lengths 3K, 8K and 16K and temperatures 0 and 1.
"""

from __future__ import annotations

import argparse
import gc
import statistics
from functools import partial
from typing import Any

import torch
from msgspec.structs import asdict

from amor import typed
from amor.bench import crossing
from amor.bench import rows as several
from amor.bench.machine import total_memory
from amor.bench.rates import firing_rates, open_gated
from amor.bench.simulate import ScheduledRounds, build_active, filled_state
from amor.bench.table import BenchmarkRow, BenchmarkTable, numbers, print_table
from amor.bench.timing import alternate, interleaved
from amor.decode.engine import Engine
from amor.decode.savings import Savings
from amor.errors import AmorError
from amor.models.amor import Amor
from amor.models.build import build
from amor.presets import NAMES, SCALES, VARIANT_NAMES, VARIANTS, preset
from amor.records.bench import (
    CrossingDetails,
    DecodeResults,
    DecodeTiming,
    ModelTiming,
    RateTiming,
    SecondsPerToken,
)

OURS = "amor-mamba2"
OUR_VARIANTS = tuple(f"{OURS}-{variant}" for variant in VARIANTS)
# ungated models that gated ones are compared with
OTHERS = ("mamba2-serial", "gated-deltanet-serial", "mamba2-fused", "transformer")
PROMPT = 512  # tokens that prefill reads
ROOM = 32  # tokens a state has space for beyond the context; a round writes fewer
CURVE_RATES, CURVE_CONTEXTS = (0.0, 0.22, 0.4, 0.7, 1.0), (4096, 16384, 65536)


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the suite."""
    options(parser)
    add, every = parser.add_argument, ",".join(NAMES + OUR_VARIANTS)
    variants = ", ".join(OUR_VARIANTS)
    default = f"with commas (default: all eight, and {variants})"
    add("--models", default=every, metavar="NAMES", help=default)
    parts = ",".join(ROWS)
    help_ = f"which measurements, with commas (default: all, {parts})"
    add("--parts", default=parts, metavar="NAMES", help=help_)
    add("--rows", default="1,8,32", metavar="N,N", help="of the part `rows` (default 1,8,32)")
    add("--model", metavar="FOLDER", help="a trained model, whose real firing rates are measured")
    add("--text", metavar="FILE", help="with --model: the text of the prompts")


def options(parser: argparse.ArgumentParser) -> None:
    """The options of everything that times decode steps."""
    add = parser.add_argument
    add("--scale", default="180m", help=f"of the presets: {', '.join(SCALES)} (default 180m)")
    add("--contexts", default="3072", metavar="N,N", help="tokens before the step (default 3072)")
    help_ = "simulated, of gated models (default 0.22,0.4)"
    add("--fire-rates", default="0.22,0.4", metavar="SHARES", help=help_)
    add("--rounds", type=int, default=5, help="rounds per side, in turn (default 5)")
    add("--quick", action="store_true", help="tiny models, only to see that everything runs")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure, print, and return the table and the results for JSON."""
    if args.text and not args.model:
        raise AmorError(f"--text {args.text}: only with --model FOLDER")
    plan = DecodePlan("decode", args)
    result = plan.describe()
    if args.model:
        model, ids = open_gated(args.model, args.text)
        result["model"] = model.config.name
        result["firing"] = typed.tree(firing_rates(model, ids))
    else:
        for part in args.parts.split(","):
            if part not in ROWS:
                raise AmorError(f"--parts: no {part!r}; there are {', '.join(ROWS)}")
            plan.table.request(part)
            result |= typed.tree(ROWS[part](plan))
    return plan.table.result() | result


class DecodePlan:
    """What is measured: the options of a suite that times decode steps, checked."""

    def __init__(self, suite: str, args: argparse.Namespace):
        self.scale = "tiny" if args.quick else args.scale
        if self.scale not in SCALES:
            raise AmorError(f"no scale {self.scale!r}; there are {', '.join(SCALES)}")
        self.contexts = numbers("--contexts", args.contexts, int)
        self.rates = numbers("--fire-rates", args.fire_rates, float)
        self.rounds, self.quick = args.rounds, args.quick
        self.rows = numbers("--rows", getattr(args, "rows", "1"), int)
        self.models = [m for m in getattr(args, "models", "").split(",") if m]
        every = NAMES + VARIANT_NAMES
        if wrong := [m for m in self.models if m not in every]:
            raise AmorError(f"--models: no {wrong[0]!r}; there are {', '.join(every)}")
        self.table = BenchmarkTable(suite, args.quick or self.scale == "tiny")

    def describe(self) -> dict[str, Any]:
        """What the JSON holds about the models."""
        vocab = SCALES[self.scale]["vocab"]
        return {"scale": self.scale, "vocab": vocab, "states": "filled with random keys"}

    def rates_of(self, model: Amor) -> list[float]:
        """The firing rates to simulate: one, 0, for a model without gates."""
        return self.rates if model.blocks else [0.0]


def contexts(plan: DecodePlan) -> DecodeResults:
    """Seconds per token of every architecture at every context, then where the curves cross."""
    curves: list[ModelTiming] = []
    for context in plan.contexts:
        curves += at_context(plan, context)
        gc.collect()
    return DecodeResults(curves=tuple(curves), crossings=tuple(crossings(plan, curves)))


def at_context(plan: DecodePlan, context: int) -> list[ModelTiming]:
    """Every architecture at one context and every firing rate, in turn."""
    shape = {"scale": plan.scale, "context": context}
    row = plan.table.row("decode, one row", "product", "attend", **shape)
    sides: dict[str, ScheduledRounds] = {}
    left_out: list[str] = []
    for name in plan.models:
        if not fits(name, plan.scale, context, sides):
            left_out.append(name)
            continue
        engine = Engine(build_active(name, plan.scale))
        for rate in plan.rates_of(engine.model):
            label = f"{name} f={rate:g}" if engine.model.blocks else name
            state = filled_state(engine.model, context, ROOM)
            sides[label] = ScheduledRounds(engine, state, rate)
    timings = time_decode(row, sides, plan.rounds)
    row.show()
    if left_out:
        print(f"left out at {context} tokens, for lack of memory: {', '.join(left_out)}")
    return [
        ModelTiming(
            **asdict(timing),
            context=context,
            rate=sides[label].rate,
            label=label,
            name=label.split(" ")[0],
        )
        for label, timing in timings.items()
    ]


def fits(name: str, scale: str, context: int, sides: dict[str, ScheduledRounds]) -> bool:
    """Whether weights and state of one more model fit into 70 % of the machine's memory."""
    used = sum(r.engine.nbytes + r.base.nbytes for r in sides.values())
    model = build(preset(name, scale), device="meta")
    weights = 4 * sum(p.numel() for p in model.parameters())
    more = 1.3 * weights + 2 * model.cost(context).state_held
    return used + more < 0.7 * (total_memory() or 2**40)


def time_decode(
    row: BenchmarkRow, sides: dict[str, ScheduledRounds], rounds: int
) -> dict[str, DecodeTiming]:
    """Seconds, bytes and FLOPs per token of every side; they are added to the row."""
    times = interleaved({label: side.pieces for label, side in sides.items()}, rounds)
    timings = {}
    for label, side in sides.items():
        per_token, cost = times[label].divided(side.tokens), side.cost()
        row.times |= {label: per_token}
        row.columns[label] = {
            "tokens/s": 1 / per_token.best,
            "MB read": cost.bytes / 1e6,
            "GFLOP": cost.flops / 1e9,
            "head passes": cost.head_passes,
            "GB/s": cost.bytes / per_token.best / 1e9,
        }
        timings[label] = DecodeTiming(
            **asdict(cost),
            seconds=per_token.best,
            median=per_token.median,
            rounds=per_token.rounds,
            tokens_per_second=1 / per_token.best,
        )
    return timings


def crossings(plan: DecodePlan, curves: list[ModelTiming]) -> list[CrossingDetails]:
    """For every gated model and rate: the context from which it beats each ungated model."""
    pairs = []
    for label in sorted({c.label for c in curves if " f=" in c.label}):
        mine = {c.context: c for c in curves if c.label == label}
        for other in OTHERS:
            theirs = {c.context: c for c in curves if c.label == other}
            shared = sorted(mine.keys() & theirs.keys())
            if shared:
                pairs.append(cross(plan, [mine[c] for c in shared], [theirs[c] for c in shared]))
    row = plan.table.row("crossings", scale=plan.scale, contexts=plan.contexts)
    for pair in pairs:
        name = f"{pair.gated} faster than {pair.other} from, tokens"
        if pair.measured is not None:
            row.numbers[name] = pair.measured
        else:
            row.lower_bounds[name] = pair.contexts[-1]
    show_crossings(pairs)
    return pairs


def cross(plan: DecodePlan, mine: list[ModelTiming], theirs: list[ModelTiming]) -> CrossingDetails:
    """Where a gated model crosses another. Both lists are over the same contexts."""
    name, other, rate = mine[0].name, theirs[0].label, mine[0].rate
    vocab = SCALES[plan.scale]["vocab"]
    passes, others = (t[0].head_passes for t in (mine, theirs))
    blocks = preset(name, plan.scale).blocks.count
    attention = crossing.attention_layers(other, plan.scale)
    gated, ungated = (build(preset(n, plan.scale), device="meta") for n in (name, other))
    both = list(zip(mine, theirs, strict=True))
    shared = tuple(timing.context for timing in mine)
    # models at one context took turns, so their rounds are compared in pairs
    pairs = [zip(a.rounds, b.rounds, strict=True) for a, b in both]
    slower = [statistics.median(a - b for a, b in pair) for pair in pairs]
    slower_by_best = [a.seconds - b.seconds for a, b in both]
    return CrossingDetails(
        gated=mine[0].label,
        other=other,
        rate=rate,
        head_passes=passes,
        head_passes_of_other=others,
        paper_formula=crossing.paper_break_even(vocab, rate),
        our_formula=crossing.break_even(vocab, rate, blocks, passes, attention, others),
        equal_bytes=crossing.bytes_break_even(gated, ungated, rate, passes, others),
        measured=crossing.measured_break_even(shared, slower),
        measured_by_best=crossing.measured_break_even(shared, slower_by_best),
        contexts=shared,
    )


def show_crossings(pairs: list[CrossingDetails]) -> None:
    """Print the crossings: measured, and by each formula."""

    def text(value: float | None) -> str:
        return "never" if value is None else f"{value / 1024:.0f}K"

    ends = {None: "not up to here", 0.0: "faster from the first"}
    rows = {}
    for pair in pairs:
        measured = ends.get(pair.measured) or text(pair.measured)
        formulas = [text(f) for f in (pair.equal_bytes, pair.our_formula, pair.paper_formula)]
        rows[f"{pair.gated} over {pair.other}"] = [measured, *formulas]
    print()
    print_table(["measured", "equal bytes", "our formula", "paper's V / (2 (1 - f))"], rows)


def curve(plan: DecodePlan) -> DecodeResults:
    """Seconds and bytes per token against the firing rate."""
    timings = []
    model = build_active(OURS, plan.scale)
    engine = Engine(model, Savings())
    for context in (64, 256) if plan.quick else CURVE_CONTEXTS:
        shape = {"scale": plan.scale, "context": context}
        row = plan.table.row("firing rate", "product", "attend", **shape)
        state = filled_state(model, context, ROOM)
        sides = {
            f"f={rate:g}": ScheduledRounds(engine, state.fork() if i else state, rate)
            for i, rate in enumerate(CURVE_RATES)
        }
        for label, timing in time_decode(row, sides, plan.rounds).items():
            rate = sides[label].rate
            timings.append(RateTiming(**asdict(timing), context=context, rate=rate))
        row.show()
    return DecodeResults(firing_curve=tuple(timings))


def prefill(plan: DecodePlan) -> DecodeResults:
    """Reading a prompt: gated models beside their backbone. The paper's gate reads the head for
    every token, once per block."""
    rate, backbone = plan.rates[0], OURS.removeprefix("amor-")
    shape = {"scale": plan.scale, "tokens": PROMPT, "rate": rate}
    row = plan.table.row("prefill", "product", "attend", "head", **shape)
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(0, SCALES[plan.scale]["vocab"], (PROMPT,), generator=generator).tolist()
    sides = {}
    for name in (backbone, OURS, *OUR_VARIANTS):
        engine = Engine(build_active(name, plan.scale))
        if engine.model.blocks:
            engine = ScheduledRounds(engine, filled_state(engine.model, 1, ROOM), rate).engine
        sides[name] = partial(engine.prefill, [prompt])
    times = alternate(sides, plan.rounds)
    row.times |= {name: each.divided(PROMPT) for name, each in times.items()}
    for name in (OURS, *OUR_VARIANTS):
        label = f"{name} over its backbone at {rate:.0%} firing"
        row.add_ratio(label, times[backbone], times[name])
    row.show()
    seconds = {name: SecondsPerToken(seconds=s) for name, s in row.seconds.items()}
    return DecodeResults(prefill=seconds)


ROWS = {
    "contexts": contexts,
    "curve": curve,
    "prefill": prefill,
    "rows": several.rows,
    "churn": several.churn,
    "drafts": several.drafts,
}
