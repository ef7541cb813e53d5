"""Fit routers to a trained model: small networks that decide where attention runs without the head.

  amor fit RUN --data DATA --out ROUTED
  amor fit RUN --data DATA --out GAIN --target gain --fire-rate 0.22 --decide once
  amor fit ROUTED --out NATIVE --detach
  amor fit MODEL --data DATA --out CALIBRATED --target none

A router predicts, from a block's input, the entropy that the model's own gate reads from the head
(--target entropy), or the nats that firing saves (--target gain). The weights of the model stay as
they are. ROUTED is a model folder with the routers in it and fit.json, the report on held-out text:
how often they decide as the own gate does, calibration, and the nats saved at equal firing rates
beside other gates. --target none keeps the gates and stores the quantiles of their scores, which
--fire-rate needs. docs/gate.md explains the numbers.
"""

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console

from amor import typed
from amor.cli import Parser
from amor.cli._model import held_out_windows, open_trained, trained_arguments
from amor.cli._terminal import show_choices
from amor.data.loader import Windows
from amor.errors import AmorError
from amor.files import folder_to_write
from amor.judge import choosing
from amor.judge.fitting import calibrate_gates, compare_decisions, detach_routers, fit
from amor.judge.windows import about
from amor.models.amor import Amor
from amor.models.folder import save
from amor.progress import Progress
from amor.records.fit import FitCost, FitReport
from amor.study.table import Table, TableRow, as_text

TARGETS = ("entropy", "gain", "none")
EVERY = 2  # one of so many tokens of a window is collected


def arguments(parser: Parser) -> None:
    """The options of the verb."""
    trained_arguments(parser)
    parser.text("--data", "FOLDER", "prepared text: train/ to fit on and valid/ to report on")
    parser.required("--out", "FOLDER", "the model folder to write")
    parser.choice("--target", TARGETS, "entropy", "what is predicted; none: store quantiles")
    parser.number("--hidden", 512, "width of the hidden layer; 0: a linear map")
    parser.choice("--decide", ("each", "once"), None, "a router per block, or one for all")
    parser.number("--fire-rate", None, "firing rate (default: by the trained threshold)", float)
    parser.number("--tokens", 131_072, "tokens collected per block")
    parser.number("--windows", 32, "held-out windows of the report")
    parser.number("--context", None, "tokens per window (default: the training length)")
    parser.flag("--no-frontier", "leave out the comparison with other gates, which takes minutes")
    parser.number("--seed", 0, "of the hidden layer's training")
    parser.flag("--detach", "put the replaced gates back instead of fitting")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Fit, detach or calibrate."""
    model, tokenizer = open_trained(args)
    folder_to_write(args.out)
    if args.detach:
        save(detach_routers(model), args.out, tokenizer)
        print(f"wrote {args.out}, with the gates it was trained with")
        return {"out": args.out}
    count = window_count(args, model)
    held_out, text = held_out_windows(args, model, tokenizer, (args.windows, count))
    if args.target == "none":
        save(calibrate_gates(model, text), args.out, tokenizer)
        print(f"wrote {args.out}: it holds the quantiles of gate scores, so --fire-rate works")
        return {"out": args.out}
    routed, report = fit_routers(args, model, text, held_out)
    save(routed, args.out, tokenizer)
    written = Path(args.out) / "fit.json"
    written.write_text(typed.text(report))
    show(report)
    print(f"wrote {args.out} and {written}")
    return typed.tree(report) | {"out": args.out}


def window_count(args: argparse.Namespace, model: Amor) -> int:
    """How many windows hold --tokens collected tokens; an error where options are wrong."""
    if args.data is None:
        raise AmorError("fit needs --data FOLDER, written by `amor prepare` with --valid")
    context = model.config.context if args.context is None else args.context
    least = {"tokens": (args.tokens, 2), "windows": (args.windows, 2), "context": (context, 1)}
    for name, (value, minimum) in least.items():
        if value < minimum:
            raise AmorError(f"--{name} {value}: give at least {minimum}")
    if not 0 <= args.hidden <= 1 << 16:
        raise AmorError(f"--hidden {args.hidden}: give a width from 0 to {1 << 16:,}")
    if args.fire_rate is not None and not 0 < args.fire_rate < 1:
        hint = "give a fraction between 0 and 1, e.g. 0.22"
        raise AmorError(f"--fire-rate {args.fire_rate}: {hint}")
    return max(2, -(-args.tokens * EVERY // context))


def fit_routers(
    args: argparse.Namespace, model: Amor, text: Windows, held_out: "Windows"
) -> tuple[Amor, FitReport]:
    """The model with routers fitted on a text, and the report on held-out text."""
    decide = args.decide or model.config.blocks.decide
    options = {"target": args.target, "hidden": args.hidden}
    with Progress("collecting", text.tokens.numel(), "tokens") as progress:
        routed, networks = fit(
            model, text, options, decide, args.fire_rate, EVERY, args.seed, progress.add
        )
    choices = None
    if not args.no_frontier:
        ways = {name: keys for name, keys in choosing.WAYS.items() if keys["gate"] != "router"}
        tokens = choosing.tokens_read(model, held_out, text, ways, extra=1)
        with Progress("comparing", tokens, "tokens") as progress:
            how: dict[str, Any] = {"ways": ways, "extra": {"this router": routed}}
            choices = choosing.compare_gates(model, held_out, text, on_tokens=progress.add, **how)
    report = FitReport(
        model=model.config.name,
        target=args.target,
        decide=decide,
        hidden=args.hidden,
        fitted_on=about(text),
        networks=tuple(networks),
        held_out=about(held_out),
        decisions=tuple(compare_decisions(model, routed, held_out)),
        cost=FitCost(
            router_flops=sum(block.gate.cost().flops for block in routed.each_block()),
            native_flops=2.0 * model.head_weight.numel() * model.probes(),
        ),
        choices=choices,
    )
    return routed, report


def show(report: FitReport) -> None:
    """Print the report as tables."""
    console = Console(highlight=False)
    text, cost = report.held_out, report.cost
    source = f"{text.windows} windows of {text.context} tokens of {text.source}"
    title = f"{report.target} predicted for {report.model}; {source}"
    rows = []
    for k, (n, d) in enumerate(zip(report.networks, report.decisions, strict=True)):
        shares = n.explained, n.explained_linear, d.agreement, d.native_rate, d.router_rate
        rows.append(TableRow(str(k), tuple(f"{100 * share:.1f} %" for share in shares)))
    fires = ("own gate fires", "router fires")
    columns = ("variance explained", "by a linear map", "decides alike", *fires)
    print(as_text(Table(title, "block", columns, tuple(rows)), console.is_terminal))
    native = f"by passes over the head {cost.native_flops:,.0f}"
    console.print(f"FLOPs per token to decide: {cost.router_flops:,.0f}, {native}")
    if report.choices is not None:
        console.print()
        show_choices(console, report.choices)
