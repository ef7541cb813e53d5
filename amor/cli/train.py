"""Train a model by a recipe; stop it any time, the same command goes on.

  amor train tiny/amor-mamba2 --data DATA --out RUN
  amor train my-recipe.toml --data DATA
  amor train tiny/mamba2 --data DATA --set lr.peak=1e-3 --steps 100
  amor train recall/mqar                                a generated task, which needs no data
  amor train paper/180m --set model.name=transformer --dry-run
  torchrun --nproc-per-node 2 -m amor train tiny/amor-mamba2 --data DATA --set distributed=ddp

RUN gets config.json, metrics.jsonl, events.jsonl and checkpoints; RUN/latest is a model folder, RUN/report.html
shows how it went. docs/training.md tells more.
Exit codes: 0 done; 2 something to mend, said in one line; 70 a bug; 130 or 143 stopped by Ctrl-C or SIGTERM after a checkpoint.
"""

import argparse
import math
import os
from typing import Any

from amor import typed
from amor.errors import AmorError
from amor.train import resume


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "recipe", metavar="RECIPE", help="a TOML file, or a recipe of the package by name, such as tiny/amor-mamba2"
    )
    parser.add_argument(
        "--set", metavar="KEY=VALUE", action="append", default=[], help="change a key of the recipe; may be repeated"
    )
    parser.add_argument("--data", metavar="FOLDER", help="prepared data: train/ and valid/")
    parser.add_argument("--out", metavar="RUN", help="the run directory (default: runs/<name of the recipe>)")
    parser.add_argument("--steps", type=int, metavar="N", help="train this many steps; the schedule is as long")
    parser.add_argument("--resume", choices=resume.CHOICES, nargs="?", const="yes", default="auto",
                        help="auto (default): go on if RUN holds a checkpoint; yes: it must; no: RUN must be new")  # fmt: skip
    parser.add_argument("--track", metavar="NAMES", help="also tell tensorboard, wandb or trackio (pip install 'amor[track]')")
    parser.add_argument("--dry-run", action="store_true", help="print parameters, memory, tokens and time; train nothing")
    parser.add_argument("--flops", type=float, metavar="N", help="with --dry-run: FLOP/s of all devices (default: measured here)")


def run(args: argparse.Namespace) -> dict[str, Any]:
    from amor.cli._seeing import as_result, observing
    from amor.train.loop import train
    from amor.train.recipe import load
    from amor.train.trackers import trackers

    given = {"data": args.data, "steps": args.steps, "track": args.track}
    keys = {key: value for key, value in given.items() if value is not None}
    recipe = load(args.recipe, args.set, **keys)
    if args.flops is not None and not (args.dry_run and 0 < args.flops < math.inf):
        raise AmorError(f"--flops {args.flops:g}: with --dry-run, give a rate above 0, e.g. --flops 312e12")
    if args.dry_run:
        trackers(recipe.track)  # that they are there
        return dry_run(recipe, args.flops)
    args.json = args.json and os.environ.get("RANK", "0") == "0"  # of many ranks one speaks
    with observing(recipe) as (observers, machine):
        return as_result(train(recipe, args.out or f"runs/{recipe.name}", observers, args.resume, machine))


def dry_run(recipe: Any, flops: float | None) -> dict[str, Any]:
    from amor.bench.machine import gemm_rate
    from amor.train.predict import lines, predict

    found = predict(recipe, flops or gemm_rate() * 1e9, "given" if flops else "measured here on a matrix product")
    print("\n".join(lines(found)))
    return dict(typed.tree(found))
