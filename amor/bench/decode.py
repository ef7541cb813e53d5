"""Decode tokens/s against context for all eight architectures and our variants of one, what each saving saves, and where
attention's price crosses.

  amor bench decode --scale 180m --contexts 3072 --json
  amor bench decode --scale 440m --contexts 3072,16384,32768,65536 --out decode.json
  amor bench decode --model RUN --text TEXT.txt

States are filled directly with random keys and values (reading a prompt of 64K tokens would take hours on two cores), and
gates fire by a schedule at the rate asked for; their probes run and are timed. With --model the firing rates of a trained model
are measured on text, at prompt lengths 3K, 8K and 16K and temperatures 0 and 1.
"""

from __future__ import annotations

import argparse
import gc
import statistics
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from msgspec.structs import asdict

from amor import typed
from amor.bench import crossing
from amor.bench.machine import total_memory
from amor.bench.memory import extra_peak
from amor.bench.rates import firing_on, firing_rates, opened
from amor.bench.simulate import Rounds, filled, speaking
from amor.bench.table import Row, Table
from amor.bench.timing import alternate, interleaved
from amor.decode.engine import Engine
from amor.decode.savings import Savings
from amor.errors import AmorError
from amor.models.amor import Amor
from amor.models.build import build
from amor.ops.backends import kernels
from amor.presets import NAMES, SCALES, VARIANT_NAMES, VARIANTS, preset
from amor.records.bench import AtRate, Crossed, Found, Measured, Memory, Seconds, Timed

OURS = "amor-mamba2"
OUR_VARIANTS = tuple(f"{OURS}-{variant}" for variant in VARIANTS)
PROMPT = 512  # tokens that prefill reads
ROOM = 32  # tokens written beyond the context, given up after every round
AUTHORS = "the authors' method (K + 1 head evaluations, eager)"
EAGER = "reference"  # torch alone: no native code, no chunks
CURVE_RATES, CURVE_CONTEXTS = (0.0, 0.22, 0.4, 0.7, 1.0), (4096, 16384, 65536)


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--scale", default="180m", help=f"of the presets: {', '.join(SCALES)} (default 180m)")
    add("--contexts", default="3072", metavar="N,N", help="tokens that stand before the step, with commas (default 3072)")
    every = ",".join(NAMES + OUR_VARIANTS)
    add("--models", default=every, metavar="NAMES", help=f"with commas (default: all eight, and {', '.join(OUR_VARIANTS)})")
    add(
        "--fire-rates", default="0.22,0.4", metavar="SHARES", help="simulated firing rates of the gated models (default 0.22,0.4)"
    )
    add(
        "--parts",
        default="contexts,savings,curve,prefill,memory",
        metavar="NAMES",
        help="which measurements, with commas (default: all, contexts,savings,curve,prefill,memory)",
    )
    add("--rounds", type=int, default=5, help="rounds a side, in turn (default 5)")
    add("--quick", action="store_true", help="tiny models, to see that everything runs; no bar is judged")
    add("--model", metavar="FOLDER", help="a trained model, whose real firing rates are measured")
    add("--text", metavar="FILE", help="with --model: the text of the prompts")


def run(args: argparse.Namespace) -> dict[str, Any]:
    scale = "tiny" if args.quick else args.scale
    if scale not in SCALES:
        raise AmorError(f"no scale {scale!r}; there are {', '.join(SCALES)}")
    table = Table("decode", args.quick or scale == "tiny")
    found: dict[str, Any] = {"scale": scale, "vocab": SCALES[scale]["vocab"], "prefill": "states filled with random keys"}
    if args.text and not args.model:
        raise AmorError(f"--text {args.text}: with --model FOLDER, whose firing rates are measured on it")
    if args.model:
        model, ids = opened(args.model, args.text)
        seen = firing_on(model, ids)
        found |= typed.tree(seen) if seen else {}
        found |= {"model": model.config.name, "firing": typed.tree(firing_rates(model, ids))}
    else:
        plan = Plan(table, scale, numbers(args.contexts, int), numbers(args.fire_rates, float), args)
        for part in args.parts.split(","):
            if part not in ROWS:
                raise AmorError(f"--parts: no {part!r}; there are {', '.join(ROWS)}")
            table.ask(part)
            found |= typed.tree(ROWS[part](plan))
    return table.result() | found


def numbers(words: str, kind: type) -> list[Any]:
    try:
        return [kind(word) for word in words.split(",")]
    except ValueError:
        raise AmorError(f"{words!r} is not a list of numbers; write for instance 3072,16384") from None


class Plan:
    """What is measured, and on what."""

    def __init__(self, table: Table, scale: str, contexts: list[int], rates: list[float], args: argparse.Namespace):
        self.table, self.scale, self.contexts, self.rates = table, scale, contexts, rates
        self.rounds, self.models = args.rounds, [m for m in args.models.split(",") if m]
        self.quick = args.quick
        if min(contexts) < 1:
            raise AmorError(f"--contexts {min(contexts)}: at least one token stands before a step")
        if not 0 <= min(rates) <= max(rates) <= 1:
            raise AmorError(f"--fire-rates {','.join(f'{rate:g}' for rate in rates)}: a rate lies between 0 and 1")
        wrong = [m for m in self.models if m not in NAMES + VARIANT_NAMES]
        if wrong:
            raise AmorError(f"--models: no {wrong[0]!r}; there are {', '.join(NAMES + VARIANT_NAMES)}")

    def rates_of(self, model: Amor) -> list[float]:
        return self.rates if model.blocks else [0.0]


def contexts(plan: Plan) -> Found:
    """Seconds a token of every architecture at every context, then where the lines cross."""
    curves: list[Measured] = []
    for context in plan.contexts:
        curves += at_context(plan, context)
        gc.collect()
    return Found(curves=tuple(curves), crossings=tuple(crossings(plan, curves)))


def at_context(plan: Plan, context: int) -> list[Measured]:
    row = plan.table.row("decode, one row", "product", "attend", scale=plan.scale, context=context)
    sides: dict[str, Rounds] = {}
    left_out: list[str] = []
    for name in plan.models:
        if not fits(name, plan.scale, context, sides):
            left_out.append(name)
            continue
        engine = Engine(speaking(name, plan.scale), Savings(cheap=True))
        for rate in plan.rates_of(engine.model):
            label = f"{name} f={rate:g}" if engine.model.blocks else name
            sides[label] = Rounds(engine, filled(engine.model, context, ROOM), rate, best=True)
    curves = [
        Measured(**asdict(one), context=context, rate=rounds.rate, label=label, name=label.split(" ")[0])
        for one, (label, rounds) in zip(timed(row, sides, plan.rounds), sides.items(), strict=True)
    ]
    if left_out:
        print(f"left out at {context} tokens, for want of memory: {', '.join(left_out)}")
    return curves


def fits(name: str, scale: str, context: int, sides: dict[str, Rounds]) -> bool:
    """Whether weights and state of one more model go into half of the machine's memory."""
    held = sum(r.engine.nbytes + r.base.nbytes for r in sides.values())
    model = build(preset(name, scale), device="meta")
    weights = 4 * sum(p.numel() for p in model.parameters())
    return held + 1.3 * weights + 2 * model.cost(context).state_held < 0.7 * (total_memory() or 2**40)


def timed(row: Row, sides: dict[str, Rounds], rounds: int) -> list[Timed]:
    """Seconds, bytes and FLOPs a token of every side."""
    taken = interleaved({label: side.pieces for label, side in sides.items()}, rounds)
    row.time({label: taken[label].each(side.tokens) for label, side in sides.items()})
    found = []
    for label, side in sides.items():
        times = row.times[label]
        found.append(
            Timed(
                **asdict(side.spend()),
                seconds=times.best,
                median=times.median,
                rounds=times.rounds,
                by_laps=times.by_laps,
                tokens_per_second=1 / times.best,
            )
        )
    print(f"\n{'':34} {'tokens/s':>9} {'ms':>8} {'median':>8} {'MB read':>8} {'GFLOP':>7} {'passes':>7} {'8-bit':>6} {'GB/s':>6}")
    for label, one in zip(sides, found, strict=True):
        rate = one.bytes / one.seconds / 1e9
        print(
            f"{label:34} {one.tokens_per_second:>9.2f} {one.seconds * 1e3:>8.2f} {one.median * 1e3:>8.2f} "
            f"{one.bytes / 1e6:>8.1f} {one.flops / 1e9:>7.3f} {one.head_passes:>7.2f} {one.cheap_passes:>6.2f} "
            f"{rate:>6.1f}"
        )
    return found


def crossings(plan: Plan, curves: list[Measured]) -> list[Crossed]:
    """For every gated model and rate: from which context on it beats each model with attention everywhere."""
    found = []
    gated = sorted({c.label for c in curves if " f=" in c.label})
    for label in gated:
        mine = {c.context: c for c in curves if c.label == label}
        for other in ("mamba2-serial", "gated-deltanet-serial", "mamba2-fused", "transformer"):
            theirs = {c.context: c for c in curves if c.label == other}
            shared = sorted(mine.keys() & theirs.keys())
            if shared:
                found.append(crossed(plan, label, other, [mine[c] for c in shared], [theirs[c] for c in shared], shared))
    row = plan.table.row("crossings", scale=plan.scale, contexts=plan.contexts)
    for one in found:
        show_crossing(one)
        name = f"{one.gated} faster than {one.other} from, tokens"
        if one.measured is not None:
            row.found[name] = one.measured
        else:
            row.beyond[name] = one.contexts[-1]
    return found


def crossed(plan: Plan, label: str, other: str, mine: list[Measured], theirs: list[Measured], shared: list[int]) -> Crossed:
    name, rate, vocab = mine[0].name, mine[0].rate, SCALES[plan.scale]["vocab"]
    passes, others = (one[0].head_passes + one[0].cheap_passes / 4 for one in (mine, theirs))
    blocks = preset(name, plan.scale).blocks.count
    attention = crossing.attention_layers(other, plan.scale)
    models = [build(preset(n, plan.scale), device="meta") for n in (name, other)]
    # models of one context took turns, so their rounds are compared in pairs
    pairs = [zip(a.rounds, b.rounds, strict=True) for a, b in zip(mine, theirs, strict=True)]
    behind = [statistics.median(a - b for a, b in pair) for pair in pairs]
    return Crossed(
        gated=label,
        other=other,
        rate=rate,
        head_passes=passes,
        head_passes_of_other=others,
        paper_formula=crossing.paper_break_even(vocab, rate),
        our_formula=crossing.break_even(vocab, rate, blocks, passes, attention, others),
        equal_bytes=crossing.bytes_break_even(models[0], models[1], rate, passes, others),
        measured=crossing.measured(shared, behind),
        measured_by_best=crossing.measured(shared, [a.seconds - b.seconds for a, b in zip(mine, theirs, strict=True)]),
        contexts=tuple(shared),
    )


def show_crossing(one: Crossed) -> None:
    def words(value: float | None) -> str:
        return "none" if value is None else f"{value / 1024:.0f}K"

    measured = "not up to here" if one.measured is None else "faster from the first" if not one.measured else words(one.measured)
    print(
        f"{one.gated} over {one.other}: measured {measured}; by equal bytes {words(one.equal_bytes)}, "
        f"our formula {words(one.our_formula)}, the paper's V / (2 (1 - f)) {words(one.paper_formula)}"
    )


def savings(plan: Plan) -> Found:
    """AMOR-Mamba2 beside its backbone at the first context: each saving switched off, all of them, and the naive way; and
    its variants with every saving."""
    context, rate = plan.contexts[0], plan.rates[0]
    row = plan.table.row("savings", "product", "attend", scale=plan.scale, context=context, rate=rate)
    backbone, model = speaking(OURS.removeprefix("amor-"), plan.scale), speaking(OURS, plan.scale)
    every = Savings(cheap=True)
    kinds = {"with every saving": every, "no cheap": Savings(), "no joint": replace(every, joint=False)}
    kinds |= {"no foresight": replace(every, foresee=False), "no sparse": replace(every, sparse=False)}
    kinds["not compiled"] = replace(every, compiled=False)
    engines = {name: Engine(model, kind) for name, kind in kinds.items()} | {"backbone": Engine(backbone, every)}
    engines |= {name: Engine(speaking(name, plan.scale), every) for name in OUR_VARIANTS}

    def side(name: str, rate: float, **how: bool) -> Rounds:
        engine = engines[name]
        return Rounds(engine, filled(engine.model, context, ROOM), rate, **how)

    judged = {"backbone": side("backbone", 0.0), "with every saving": side("with every saving", rate)}
    judged["no firing"] = side("with every saving", 0.0)
    judged["blocks at different tokens"] = side("with every saving", rate, together=False)
    judged |= {name: side(name, rate) for name in OUR_VARIANTS}
    found = timed(row, judged, 2 * plan.rounds)  # these take turns directly, and longer
    sides = {name: side(name, rate) for name in kinds if name not in judged}
    sides["backbone, best token"] = side("backbone", 0.0, best=True)
    sides["best token"], sides["best token, no firing"] = (side("with every saving", r, best=True) for r in (rate, 0.0))
    found += timed(row, sides, plan.rounds)
    by_torch = {
        name: Rounds(Engine(model, kind), filled(model, context, ROOM), rate)
        for name, kind in {"naive": Savings.none(), AUTHORS: Savings.authors()}.items()
    }

    def eagerly(rounds: Rounds) -> None:
        with kernels(EAGER):
            rounds.run()

    slow = {name: partial(eagerly, rounds) for name, rounds in by_torch.items()}
    took = alternate(slow | {"with every saving": judged["with every saving"].run}, plan.rounds)
    for name, rounds in by_torch.items():
        row.time({name: took[name].each(rounds.tokens)})
        over = "the naive way" if name == "naive" else name
        row.ratio(f"{OURS} over {over} at {rate:.0%} firing", took[name], took["with every saving"])
    # like for like: the logits of the output on both sides, and below its best token alone on both
    firing, taken = f"{OURS} over its backbone at {rate:.0%} firing", row.times
    row.ratio(firing, taken["backbone"], taken["with every saving"])
    for name in OUR_VARIANTS:
        row.ratio(f"{name} over its backbone at {rate:.0%} firing", taken["backbone"], taken[name])
    row.ratio(f"{OURS} over its backbone at no firing", taken["backbone"], taken["no firing"])
    row.ratio(f"{firing}, blocks at different tokens", taken["backbone"], taken["blocks at different tokens"])
    row.ratio(f"{firing}, the best token alone", taken["backbone, best token"], taken["best token"])
    alone = f"{OURS} over its backbone at no firing, the best token alone"
    row.ratio(alone, taken["backbone, best token"], taken["best token, no firing"])
    row.show()
    named: dict[str, Timed | Seconds] = dict(zip([*judged, *sides], found, strict=True))
    return Found(savings=named | {name: Seconds(seconds=row.seconds[name]) for name in by_torch})


def curve(plan: Plan) -> Found:
    """What the saved attention saves: seconds and bytes a token against the firing rate."""
    found = []
    model = speaking(OURS, plan.scale)
    engine = Engine(model, Savings())
    for context in (64, 256) if plan.quick else CURVE_CONTEXTS:
        row = plan.table.row("firing rate", "product", "attend", scale=plan.scale, context=context)
        state = filled(model, context, ROOM)
        sides = {f"f={rate:g}": Rounds(engine, state.fork() if i else state, rate) for i, rate in enumerate(CURVE_RATES)}
        for one, rounds in zip(timed(row, sides, plan.rounds), sides.values(), strict=True):
            found.append(AtRate(**asdict(one), context=context, rate=rounds.rate))
    return Found(firing_curve=tuple(found))


def memory(plan: Plan) -> Found:
    """The most memory decode holds, beside weights and state as declared."""
    context = plan.contexts[0]
    row = plan.table.row("memory", scale=plan.scale, context=context)
    model = speaking(OURS, plan.scale)
    rounds = Rounds(Engine(model, Savings(cheap=True)), filled(model, context, ROOM), plan.rates[0])
    rounds.run()
    declared = rounds.engine.nbytes + rounds.base.nbytes
    extra = extra_peak(rounds.run)
    row.found["declared, MB"] = declared / 1e6
    if extra is not None:
        row.found["beyond it at the peak, MB"] = extra / 1e6
        row.found["peak over declared"] = (declared + extra) / declared
    row.show()
    return Found(memory=Memory(declared=declared, extra=extra))


def prefill(plan: Plan) -> Found:
    """Reading a prompt: gated models beside their backbone. The paper's gate asks the head about every token, once per block."""
    row = plan.table.row("prefill", "product", "attend", "head", scale=plan.scale, tokens=PROMPT, rate=plan.rates[0])
    names = (OURS.removeprefix("amor-"), OURS, *OUR_VARIANTS)
    prompt = torch.randint(0, SCALES[plan.scale]["vocab"], (PROMPT,), generator=torch.Generator().manual_seed(0)).tolist()
    sides = {}
    for name in names:
        engine = Engine(speaking(name, plan.scale))
        if engine.model.blocks:
            engine = Rounds(engine, filled(engine.model, 1, ROOM), plan.rates[0]).engine
        sides[name] = partial(engine.prefill, [prompt])
    times = alternate(sides, plan.rounds)
    row.time({name: taken.each(PROMPT) for name, taken in times.items()})
    for name in names[1:]:
        row.ratio(f"{name} over its backbone at {plan.rates[0]:.0%} firing", times[names[0]], times[name])
    row.show()
    return Found(prefill={name: Seconds(seconds=taken.best / PROMPT) for name, taken in times.items()})


ROWS = {"contexts": contexts, "savings": savings, "curve": curve, "prefill": prefill, "memory": memory}
