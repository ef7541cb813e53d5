"""Train a model by a recipe; stop it any time, the same command goes on.

  amor train tiny/amor-mamba2 --data DATA --out RUN
  amor train tiny --model mamba2-serial --data DATA     the same as tiny/mamba2-serial
  amor train my-recipe.toml --data DATA
  amor train tiny/mamba2 --data DATA --set lr.peak=1e-3 --steps 100
  amor train recall/mqar                                a generated task, which needs no data
  amor train paper/180m --model transformer --dry-run
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
from amor.presets import every_name
from amor.train import resume
from amor.train.recipe import Recipe, file_names


def arguments(parser: argparse.ArgumentParser) -> None:
    files = ", ".join(name for name in file_names() if not name.endswith("/base"))
    parser.add_argument(
        "recipe",
        metavar="RECIPE",
        help=f"a TOML file, tiny, tiny/MODEL with a name that --model takes, or one of: {files}",
    )
    parser.add_argument(
        "--model",
        metavar="NAME",
        help="train this architecture by the recipe; one of: " + ", ".join(every_name()),
    )
    parser.add_argument(
        "--set",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="change a key of the recipe; may be repeated",
    )
    parser.add_argument("--data", metavar="FOLDER", help="prepared data: train/ and valid/")
    parser.add_argument("--out", metavar="RUN", help="the run directory (default: runs/<name of the recipe>)")
    parser.add_argument("--steps", type=int, metavar="N", help="train this many steps; the schedule is as long")
    parser.add_argument(
        "--resume",
        choices=resume.CHOICES,
        nargs="?",
        const="yes",
        default="auto",
        help="auto (default): go on if RUN holds a checkpoint; yes: it must; no: RUN must be new",
    )
    parser.add_argument(
        "--track",
        metavar="NAMES",
        help="also log to tensorboard, wandb or trackio (pip install 'amor[track]')",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print parameters, memory, tokens and time; train nothing",
    )
    parser.add_argument(
        "--flops",
        type=float,
        metavar="N",
        help="with --dry-run: FLOP/s of all devices (default: measured here)",
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    from amor.cli._seeing import as_result, observing
    from amor.train.loop import train
    from amor.train.recipe import load
    from amor.train.trackers import trackers

    given = {"data": args.data, "steps": args.steps, "track": args.track}
    keys = {key: value for key, value in given.items() if value is not None}
    recipe = load(args.recipe, args.set, args.model, **keys)
    if args.flops is not None and not (args.dry_run and 0 < args.flops < math.inf):
        raise AmorError(f"--flops {args.flops:g}: with --dry-run, give a rate above 0, e.g. --flops 312e12")
    if args.dry_run:
        trackers(recipe.track)  # an error if one is not installed
        return dry_run(recipe, args.flops)
    args.json = args.json and os.environ.get("RANK", "0") == "0"  # only rank 0 prints
    with observing(recipe) as (observers, machine):
        out = args.out or f"runs/{recipe.name}"
        return as_result(train(recipe, out, observers, args.resume, machine))


def dry_run(recipe: Recipe, flops: float | None) -> dict[str, Any]:
    """Print a prediction of what the run takes; flops: of all devices per second, None measures."""
    from amor.bench.machine import gemm_rate
    from amor.train.predict import lines, predict

    source = "given" if flops else "measured here on a matrix product"
    prediction = predict(recipe, flops or gemm_rate() * 1e9, source)
    print("\n".join(lines(prediction)))
    return dict(typed.tree(prediction))
