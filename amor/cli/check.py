"""Whether a model computes the same however tokens are fed: whole, cut, stepped, padded, decoded.

Compares logits, gate scores and decisions and final states with the plain forward, on this machine,
the decode engine's included. Exit code 1 when one differs. A preset is given random weights that
matter and gates that fire. A row is compared up to its first tie, a decision whose score lies at
the threshold: `tokens` counts what was compared.

  amor check amor-mamba2
  amor check runs/demo --length 300
"""

import argparse
import dataclasses
from typing import Any

from rich.console import Console
from rich.table import Table

from amor.cli import Parser
from amor.cli._model import config_arguments, config_changes, is_preset, model_config, model_name
from amor.errors import AmorError
from amor.judge.check import check
from amor.judge.randomise import randomise_for_test
from amor.models.build import build
from amor.models.folder import load_model
from amor.numbers import finite
from amor.ops.product.formats import FORMATS

MOST_TOKENS = 1 << 20  # of all rows; the logits of every token are kept, twice


def arguments(parser: Parser) -> None:
    """The options of the verb."""
    config_arguments(parser)
    parser.number("--length", 80, "tokens of the longest row")
    parser.number("--rows", 4, "rows of the batch")
    parser.number("--seed", 0, "of tokens, lengths and cuts")
    words = "formats of the decode engine's weights, with commas"
    parser.text("--weights", "NAMES", words, ",".join(FORMATS))


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Check one model."""
    if args.length < 8 or args.rows < 1 or args.length * args.rows > MOST_TOKENS:
        sizes = f"--length {str(args.length)[:40]} --rows {str(args.rows)[:40]}"
        limits = f"give at least 8 tokens and 1 row, and at most {MOST_TOKENS:,} tokens in all"
        raise AmorError(f"{sizes}: {limits}")
    if abs(args.seed) >= 1 << 63:
        raise AmorError(f"--seed {args.seed}: give a number of at most 63 bits, e.g. 1")
    if is_preset(args):
        model = randomise_for_test(build(model_config(args)))
    elif config_changes(args):
        raise AmorError("--set changes a preset; a model folder is checked as it is")
    else:
        model = load_model(model_name(args))
    findings = check(model, args.length, args.rows, args.seed, args.weights.split(","))
    draw(model.config.name, findings)
    rows = [dataclasses.asdict(f) for f in findings]
    for row in rows:  # JSON has neither nan nor infinity
        row |= {name: finite(row[name]) for name in ("logits", "scores", "states")}
    return {"model": model.config.name, "ok": all(f.ok for f in findings), "ways": rows}


def draw(name: str, findings: list[Any]) -> None:
    """Print a row per way of feeding."""
    title = f"[bold]{name}: largest difference from the plain forward[/]"
    table = Table("fed", box=None, header_style="dim", padding=(0, 1, 0, 0))
    for column in ("logits", "scores", "states", "tokens", "flips", "ties", ""):
        table.add_column(column, justify="right", no_wrap=True)
    for f in findings:
        if f.left_out:
            table.add_row(f.way, *["-"] * 6, "left out")
            continue
        differences = ["-" if d != d else f"{d:.1e}" for d in (f.logits, f.scores, f.states)]
        counts = [str(count) for count in (f.tokens, f.flips, f.ties)]
        verdict = "[green]same[/]" if f.ok else "[red]DIFFERS[/]"
        table.add_row(f.way, *differences, *counts, verdict)
    console = Console(highlight=False)
    console.print(title)
    console.print(table)
    for reason in dict.fromkeys(f.left_out for f in findings if f.left_out):
        console.print(f"left out: {reason}")
