"""Train a model by a recipe; stop it any time, the same command goes on.

  amor train tiny/amor-mamba2 --data DATA --out RUN
  amor train tiny --model mamba2-serial --data DATA     the same as tiny/mamba2-serial
  amor train my-recipe.toml --data DATA
  amor train tiny/mamba2 --data DATA --set lr.peak=1e-3 --steps 100
  amor train recall/mqar                                a generated task, which needs no data
  amor train paper/180m --model transformer --dry-run
  torchrun --nproc-per-node 2 -m amor train tiny/amor-mamba2 --data DATA --set distributed=ddp

RUN gets config.json, metrics.jsonl, events.jsonl and checkpoints; RUN/latest is a model folder,
RUN/report.html shows how it went. docs/training.md has more.
Exit codes: 0 done; 2 something to mend, in one line; 70 a bug; 130 or 143 stopped by Ctrl-C or
SIGTERM after a checkpoint.
"""

import argparse
import math
import os
from typing import Any

from amor import typed
from amor.bench import machine
from amor.cli import Parser
from amor.cli._training import run_result, train_observed
from amor.errors import AmorError
from amor.presets import every_name
from amor.train import resume
from amor.train.predict import lines, predict
from amor.train.recipe import Recipe, file_names, fit_warmup, load
from amor.train.trackers import trackers


def arguments(parser: Parser) -> None:
    """The options of the verb."""
    files = ", ".join(name for name in file_names() if not name.endswith("/base"))
    kinds = "a TOML file, tiny, tiny/MODEL with a name that --model takes, or one of: "
    parser.argument("recipe", "RECIPE", kinds + files)
    words = "train this architecture by the recipe; one of: " + ", ".join(every_name())
    parser.text("--model", "NAME", words)
    parser.repeated("--set", "KEY=VALUE", "change a key of the recipe")
    parser.text("--data", "FOLDER", "prepared data: train/ and valid/")
    parser.text("--out", "RUN", "the run directory (default: runs/<name of the recipe>)")
    parser.number("--steps", None, "train this many steps, at most a tenth of them as warm-up")
    words = "auto (default): go on if RUN holds a checkpoint; yes: it must; no: RUN must be new"
    modes: dict[str, Any] = {"choices": resume.CHOICES, "const": "yes", "default": "auto"}
    parser.add_argument("--resume", nargs="?", **modes, help=words)
    parser.text("--track", "NAMES", "also log to tensorboard, wandb or trackio")
    parser.flag("--dry-run", "print parameters, memory, tokens and time; train nothing")
    parser.number("--flops", None, "of --dry-run: FLOP/s of all devices (default: measured)", float)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Train, or predict what the run takes."""
    keys = {"data": args.data, "steps": args.steps, "track": args.track}
    recipe = load(args.recipe, args.set, args.model, **keys)
    if args.steps is not None and "lr.warmup" not in typed.assignments(args.set, ""):
        recipe = shorten_warmup(recipe)
    if args.flops is not None and not (args.dry_run and 0 < args.flops < math.inf):
        hint = "with --dry-run, give a rate above 0, e.g. --flops 312e12"
        raise AmorError(f"--flops {args.flops:g}: {hint}")
    if args.dry_run:
        trackers(recipe.track)  # an error if one is not installed
        return dry_run(recipe, args.flops)
    args.json = args.json and on_rank_0()
    return run_result(train_observed(recipe, args.out or f"runs/{recipe.name}", args.resume))


def shorten_warmup(recipe: Recipe) -> Recipe:
    """Fit the warm-up to --steps, and print it where it changes."""
    fitted = fit_warmup(recipe)
    if fitted != recipe and on_rank_0():
        change = f"warm-up {fitted.lr.warmup} steps instead of {recipe.lr.warmup}"
        print(f"{change}: a tenth of --steps (--set lr.warmup={recipe.lr.warmup} keeps it)")
    return fitted


def on_rank_0() -> bool:
    """Whether this process is the only one, or the first of those that torchrun started."""
    return os.environ.get("RANK", "0") == "0"


def dry_run(recipe: Recipe, flops: float | None) -> dict[str, Any]:
    """Print a prediction of what the run takes; flops: of all devices per second, None measures."""
    source = "given" if flops else "measured here on a matrix product"
    prediction = predict(recipe, flops or machine.gemm_rate() * 1e9, source)
    print("\n".join(lines(prediction)))
    return dict(typed.tree(prediction))
