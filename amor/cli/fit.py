"""Fit routers to a trained model: small networks that decide where attention runs without asking the head.

  amor fit RUN --data DATA --out ROUTED
  amor fit RUN --data DATA --out GAIN --target gain --fire-rate 0.22 --decide once
  amor fit ROUTED --out NATIVE --detach
  amor fit MODEL --data DATA --out CALIBRATED --target none

A router predicts, from what a block reads, the entropy that the model's own gate asks the head for (--target entropy), or the
nats that firing saves (--target gain). The weights of the model stay as they are. ROUTED is a model folder with the routers in it
and fit.json, the report on held-out text: how often they decide as the own gate does, calibration, and the nats saved at equal
firing rates beside other gates. --target none keeps the gates and stores the quantiles of their scores, which --fire-rate needs.
docs/gate.md tells what the numbers mean.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from amor import typed
from amor.cli._model import opened
from amor.errors import AmorError
from amor.files import folder_to_write

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from amor.data.loader import Windows
    from amor.models.amor import Amor
    from amor.records.fit import FitReport

TARGETS = ("entropy", "gain", "none")
EVERY = 2  # one of so many tokens of a window is collected


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("name", nargs="?", metavar="MODEL", help="a model folder, or a run (its latest model)")
    add("--model", metavar="MODEL", help="the same, as an option")
    add("--tokenizer", help="for a model folder without one: bytes, llama-3.1, or a tokenizer.json")
    add("--data", metavar="FOLDER", help="prepared text: routers are fitted on train/ and reported on valid/")
    add("--out", required=True, metavar="FOLDER", help="the model folder to write")
    add("--target", default="entropy", choices=TARGETS, help="what is predicted (default entropy); none: store quantiles only")
    add("--hidden", type=int, default=512, metavar="N", help="width of the hidden layer (default 512); 0: a linear map")
    add("--decide", choices=("each", "once"), help="a router per block, or one for all (default: as the model's own gates)")
    add("--fire-rate", type=float, metavar="FRACTION", help="threshold for this firing rate (default: the trained threshold)")
    add("--tokens", type=int, default=131_072, metavar="N", help="tokens collected per block (default 131,072)")
    add("--windows", type=int, default=32, metavar="N", help="held-out windows of the report (default 32)")
    add("--context", type=int, metavar="N", help="tokens per window (default: the training length)")
    add("--no-frontier", action="store_true", help="leave out the comparison with other gates, which takes minutes")
    add("--seed", type=int, default=0, metavar="N", help="of the hidden layer's training")
    add("--detach", action="store_true", help="put the replaced gates back instead of fitting")


def run(args: argparse.Namespace) -> dict[str, Any]:
    from amor.judge.fitting import calibrate_gates, detach_routers
    from amor.models.folder import save

    model, tokenizer = opened(args)
    folder_to_write(args.out)
    if args.detach:
        save(detach_routers(model), args.out, tokenizer)
        print(f"wrote {args.out}, with the gates it was trained with")
        return {"out": args.out}
    text, held_out = windows(args, model, tokenizer)
    if args.target == "none":
        save(calibrate_gates(model, text), args.out, tokenizer)
        print(f"wrote {args.out}: its gates know the quantiles of their scores, so --fire-rate works")
        return {"out": args.out}
    other, report = fitted(args, model, text, held_out)
    save(other, args.out, tokenizer)
    written = Path(args.out) / "fit.json"
    written.write_text(typed.text(report))
    show(report)
    print(f"wrote {args.out} and {written}")
    return typed.tree(report) | {"out": args.out}


def windows(args: argparse.Namespace, model: "Amor", tokenizer: "Tokenizer | None") -> "tuple[Windows, Windows]":
    """Text to fit on, and held-out text to report on."""
    from amor.data.shards import splits
    from amor.judge.windows import of_shards

    if args.data is None:
        raise AmorError("fit needs --data FOLDER, written by `amor prepare` with --valid")
    for name in ("tokens", "windows"):
        if getattr(args, name) < 2:
            raise AmorError(f"--{name} {getattr(args, name)}: give at least 2")
    train, valid = splits(args.data)
    if valid is None:
        raise AmorError(f"{args.data} holds no held-out text; prepare it with --valid")
    context = model.config.context if args.context is None else args.context
    if context < 1:
        raise AmorError(f"--context {context}: give at least 1")
    count = max(2, -(-args.tokens * EVERY // context))
    text, held_out = (
        of_shards(shards.folder, context, n, tokenizer, model.config.vocab, False)
        for shards, n in ((train, count), (valid, args.windows))
    )
    return text, held_out


def fitted(args: argparse.Namespace, model: "Amor", text: "Windows", held_out: "Windows") -> "tuple[Amor, FitReport]":
    from amor.progress import Progress
    from amor.judge import choosing
    from amor.judge.fitting import compare_decisions, fit
    from amor.judge.windows import about
    from amor.records.fit import FitCost, FitReport

    if not 0 <= args.hidden <= 1 << 16:
        raise AmorError(f"--hidden {args.hidden}: give a width from 0 to {1 << 16:,}")
    if args.fire_rate is not None and not 0 < args.fire_rate < 1:
        raise AmorError(f"--fire-rate {args.fire_rate}: give a fraction between 0 and 1, e.g. 0.22")
    decide = args.decide or model.config.blocks.decide
    options = {"target": args.target, "hidden": args.hidden}
    with Progress("collecting", text.tokens.numel(), "tokens") as progress:
        other, networks = fit(model, text, options, decide, args.fire_rate, EVERY, args.seed, progress.add)
    choices = None
    if not args.no_frontier:
        ways = {name: keys for name, keys in choosing.WAYS.items() if keys["gate"] != "router"}
        passes = choosing.passes(len(model.blocks), model.config.blocks.decide == "once", ways=len(ways) + 1)
        with Progress("comparing", passes * held_out.tokens.numel() + text.tokens.numel(), "tokens") as progress:
            extra = {"this router": other}
            choices = choosing.compare_gates(model, held_out, text, on_tokens=progress.add, ways=ways, extra=extra)
    head, blocks = 2.0 * model.head_weight.numel(), other.each_block()
    cost = FitCost(router_flops=sum(block.gate.cost().flops for block in blocks), native_flops=head * model.probes())
    report = FitReport(
        model=model.config.name,
        target=args.target,
        decide=decide,
        hidden=args.hidden,
        fitted_on=about(text),
        networks=tuple(networks),
        held_out=about(held_out),
        decisions=tuple(compare_decisions(model, other, held_out)),
        cost=cost,
        choices=choices,
    )
    return other, report


def show(report: "FitReport") -> None:
    from rich.console import Console

    from amor.cli._judged import show_choices
    from amor.study.table import Table, TableRow, as_text

    console = Console(highlight=False)
    text = report.held_out
    head = f"{report.target} predicted for {report.model}; {text.windows} windows of {text.context} tokens of {text.source}"
    columns = ("variance explained", "by a linear map", "decides alike", "own gate fires", "router fires")
    rows = []
    for index, (network, decided) in enumerate(zip(report.networks, report.decisions, strict=True)):
        shares = (network.explained, network.explained_linear, decided.agreement, decided.native_rate, decided.router_rate)
        rows.append(TableRow(str(index), tuple(f"{100 * share:.1f} %" for share in shares)))
    print(as_text(Table(head, "block", columns, tuple(rows)), console.is_terminal))
    cost = report.cost
    console.print(f"FLOPs per token to decide: {cost.router_flops:,.0f}, by passes over the head {cost.native_flops:,.0f}")
    if report.choices is not None:
        console.print()
        show_choices(console, report.choices)
