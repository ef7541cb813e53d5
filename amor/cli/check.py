"""Whether a model says the same however its tokens are fed: whole, cut, stepped, padded, ragged, packed, restored, decoded.

Compares logits, gate scores and decisions and final states with the plain forward, on this machine, the decode engine's
included. Exit code 1 when one differs. A preset is given random weights that matter and gates that fire.
A row is compared up to its first tie, a decision whose score lies at the threshold: `tokens` counts what was compared.

  amor check amor-mamba2
  amor check runs/demo --length 300
"""

import argparse
import dataclasses
from typing import Any

from amor.cli._model import changes, is_preset, model_arguments, model_config, named
from amor.errors import AmorError
from amor.numbers import finite


def arguments(parser: argparse.ArgumentParser) -> None:
    model_arguments(parser)
    parser.add_argument("--length", type=int, default=80, metavar="N", help="tokens of the longest row (default 80)")
    parser.add_argument("--rows", type=int, default=4, metavar="N", help="rows of the batch (default 4)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of tokens, lengths and cuts (default 0)")
    words = "formats of the decode engine's weights, with commas (default: float32,float16,int8,int4)"
    parser.add_argument("--weights", default="float32,float16,int8,int4", metavar="NAMES", help=words)


def run(args: argparse.Namespace) -> dict[str, Any]:
    from amor.judge.check import check
    from amor.judge.randomise import randomise_for_test
    from amor.models.build import build
    from amor.models.folder import load_model

    if args.length < 8 or args.rows < 1:
        raise AmorError(f"--length {args.length} --rows {args.rows}: at least 8 tokens and 1 row are needed")
    if abs(args.seed) >= 1 << 63:
        raise AmorError(f"--seed {args.seed}: give a number of at most 63 bits, e.g. 1")
    if is_preset(args):
        model = randomise_for_test(build(model_config(args)))
    elif changes(args):
        raise AmorError("--set changes a preset; a model folder is checked as it is")
    else:
        model = load_model(named(args))
    findings = check(model, args.length, args.rows, args.seed, args.weights.split(","))
    draw(model.config.name, findings)
    rows = [dataclasses.asdict(f) for f in findings]
    for row in rows:  # JSON has neither nan nor infinity
        row |= {name: finite(row[name]) for name in ("logits", "scores", "states")}
    return {"model": model.config.name, "ok": all(f.ok for f in findings), "ways": rows}


def draw(name: str, findings: list[Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(
        title=f"{name}: largest difference from the plain forward",
        title_justify="left",
        title_style="bold",
        box=None,
        header_style="dim",
        padding=(0, 1, 0, 0),
    )
    for column in ("fed", "logits", "scores", "states", "tokens", "flips", "ties", ""):
        table.add_column(column, justify="left" if column == "fed" else "right", no_wrap=True)
    for f in findings:
        if f.left_out:
            table.add_row(f.way, *["-"] * 6, "left out")
            continue
        apart = ["-" if value != value else f"{value:.1e}" for value in (f.logits, f.scores, f.states)]
        counts = [str(count) for count in (f.tokens, f.flips, f.ties)]
        table.add_row(f.way, *apart, *counts, "[green]same[/]" if f.ok else "[red]DIFFERS[/]")
    console = Console(highlight=False)
    console.print(table)
    for reason in dict.fromkeys(f.left_out for f in findings if f.left_out):
        console.print(f"left out: {reason}")
