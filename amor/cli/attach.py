"""Put gated blocks behind a pretrained recurrent model, calibrate them on a text, and train the blocks alone.

  amor attach MAMBA2 --out FOLDER --text book.txt                         K = 3 blocks, thresholds from a text; nothing is trained
  amor attach MAMBA2 --out RUN --data DATA --train-steps 300              and the blocks trained, the backbone frozen to the bit
  amor attach models/mamba2 --out NEW --blocks 1 --fire-rate 0.2 --data DATA   one block that fires on a fifth of the tokens

MAMBA2 is a model folder or run of ours without blocks, or any source of `amor convert`, which is converted on the way. Until a
block has learned something the result says what the backbone says, to the bit. With --train-steps FOLDER is a run directory
(stop it any time, the same command goes on), else a model folder. docs/how-to/attach.md walks through it.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from amor.config import CHOICES
from amor.errors import AmorError

if TYPE_CHECKING:
    from amor.convert.opened import Opened
    from amor.models.amor import Amor

RECIPE = "attach/blocks"
START = "start"  # in the run directory: the attached model before its first step


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("backbone", metavar="BACKBONE", help="a model folder or run without blocks, or a source of amor convert")
    parser.add_argument("--out", required=True, metavar="FOLDER", help="where the result goes")
    parser.add_argument("--blocks", type=int, default=3, metavar="K", help="gated blocks (default 3)")
    parser.add_argument("--gate", default="entropy", metavar="KIND", help="of amor/gates (default entropy, the paper's)")
    parser.add_argument(
        "--fire-rate", type=float, metavar="R", help="fire on this share of tokens (default: the gate's own rule)"
    )
    parser.add_argument("--head-size", type=int, default=64, metavar="N", help="of the blocks' attention (default 64)")
    words = "what gates ask the head about: what their block reads (the default, the paper's), or the output's vector"
    parser.add_argument("--probe", choices=CHOICES["probe"], default="block", help=words)
    parser.add_argument("--text", metavar="FILE", help="a text to calibrate thresholds on (default: DATA/train)")
    parser.add_argument("--data", metavar="DATA", help="prepared data: train/ to learn from, valid/ to judge by")
    parser.add_argument(
        "--train-steps", type=int, default=0, metavar="N", help="train for this many steps (default 0: not at all)"
    )
    parser.add_argument(
        "--freeze", action=argparse.BooleanOptionalAction, default=True, help="train the blocks alone (default), or all"
    )
    parser.add_argument("--recipe", default=RECIPE, metavar="RECIPE", help=f"of the training (default {RECIPE})")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="change a key of the recipe, e.g. lr.peak=1e-3"
    )
    parser.add_argument("--vocab", type=int, metavar="N", help="keep the first N tokens of the vocabulary: the rest is padding")


def run(args: argparse.Namespace) -> dict[str, Any]:
    from amor.attach.blocks import AttachOptions, attached
    from amor.convert.opened import open_model

    recipe = recipe_of(args)
    asked = AttachOptions(args.blocks, args.gate, args.fire_rate, args.head_size, args.probe)
    asked.keys()
    begins(args)
    opened = open_model(args.backbone, args.vocab)
    found = converted(opened)
    if not found.get("ok", True):
        return found
    model = attached(opened.model, asked, recipe.seed)
    found |= {"blocks": args.blocks, "gate": model.config.blocks.gate, "frozen": args.freeze}
    return found | (trained(args, recipe, opened, model) if args.train_steps else untrained(args, recipe, opened, model))


def begins(args: argparse.Namespace) -> None:
    """What can be wrong with the options alone, before a model is read."""
    from amor.files import require_empty

    if not args.data and not args.text:
        raise AmorError("thresholds are calibrated on a text; give --text FILE, or --data FOLDER written by `amor prepare`")
    if args.train_steps < 0:
        raise AmorError(f"--train-steps {args.train_steps}: give 0 or more")
    if args.train_steps and not args.data:
        raise AmorError("--train-steps needs --data FOLDER, written by `amor prepare`")
    if not args.train_steps:
        require_empty(args.out)


def recipe_of(args: argparse.Namespace) -> Any:
    from amor.train.recipe import load

    keys = {"freeze": "backbone" if args.freeze else "none"} | ({"data": args.data} if args.data else {})
    return load(args.recipe, args.set, **keys | ({"steps": args.train_steps} if args.train_steps > 0 else {}))


def converted(opened: Opened) -> dict[str, Any]:
    """Of a source of another library: that it says the same as ours."""
    from amor.convert.compare import compare
    from amor.convert.opened import Opened as Same

    config = opened.model.config
    print(f"{opened.folder}: {opened.title}, {len(config.pattern)} layers, width {config.width}, vocabulary {config.vocab:,}")
    for note in opened.notes:
        print(f"note: {note}")
    if opened.layout is None:
        return {"source": opened.title}
    same = compare(opened, Same(opened.model, None, None, opened.folder))
    print(same)
    return {"source": opened.title, "ok": same.ok, "compared": asdict(same)}


def prepared(args: argparse.Namespace, recipe: Any, opened: Opened, model: Amor) -> dict[str, Any]:
    """Calibrate the model, and say what it is made of."""
    from amor.attach.blocks import table
    from amor.attach.proof import same_output
    from amor.attach.text import adapts, calibrate, calibration

    windows = calibration(opened, args.data, args.text, recipe.context, recipe.eval.windows)
    blocks = model.config.blocks
    print(f"{blocks.count} gated blocks behind it (gate {blocks.gate}, heads of {blocks.head_size}), and no final norm")
    print("\n".join(table(model, str(opened.folder), args.freeze)))
    found: dict[str, Any] = {"ok": same_output(opened.model, model, windows, closed=False)}
    print(f"at step 0 it says what the backbone says, to the bit: {yes(found['ok'])}")
    if not adapts(model):
        return found | {"thresholds": []}
    found["thresholds"] = calibrate(model, windows)
    told = [f"{t['threshold']:.3f} (fires on {100 * t['fire']:.0f} %)" for t in found["thresholds"]]
    print(f"thresholds from {windows.tokens.numel():,} tokens of {windows.source}: {', '.join(told)}")
    found["ok"] = found["ok"] and same_output(opened.model, model, windows, closed=False)  # gates that fire change nothing yet
    return found


def untrained(args: argparse.Namespace, recipe: Any, opened: Opened, model: Amor) -> dict[str, Any]:
    from amor.attach.blocks import write

    found = prepared(args, recipe, opened, model)
    if found["ok"]:
        write(opened, model, Path(args.out))
        print(f"written: {args.out}")
    return found | {"out": args.out}


def trained(args: argparse.Namespace, recipe: Any, opened: Opened, model: Amor) -> dict[str, Any]:
    """Train by the one trainer there is, and compare what it leaves with what was there."""
    from amor.attach.blocks import write_start
    from amor.attach.proof import judged
    from amor.models.folder import load_model
    from amor.train.watch import number

    found = prepared(args, recipe, opened, model)
    if not found["ok"]:
        return found
    start = Path(args.out) / START
    write_start(opened, model, start)
    recipe = replace(
        recipe, name=Path(args.out).name, model=replace(recipe.model, name=model.config.name, scale="", start=str(start))
    )
    before = judged(opened.model, recipe)
    print(f"held-out perplexity before: {number(before['perplexity'])} on {before['tokens']:,} tokens")
    ended, gradients = learned(recipe, args.out)
    if not ended["done"]:
        return found | ended
    after_model = load_model(args.out).eval()
    after = judged(after_model, recipe)
    fires = ", ".join(f"{fire:.0%}" for fire in after["fire"])
    print(f"held-out perplexity after:  {number(after['perplexity'])}, attention on {fires} of the tokens")
    found |= {"before": before, "after": after, "out": args.out, "steps": ended["step"], "gradients": gradients}
    ok = not gradients.get("silent") and not gradients.get("missing")
    if not args.freeze:
        return found | {"ok": ok}
    shown = untouched(opened, after_model, recipe)
    return found | shown | {"ok": ok and shown["shut_is_backbone"] and not shown["moved"]}


def untouched(opened: Opened, model: Amor, recipe: Any) -> dict[str, Any]:
    """That the backbone is what it was: its tensors, and what it says with every gate shut."""
    from amor.attach.proof import moved, same_output
    from amor.attach.text import calibration

    before = opened.model.state_dict()
    changed = moved(before, model)
    windows = calibration(opened, recipe.data, None, recipe.context, recipe.eval.windows)
    shut = same_output(opened.model, model, windows, closed=True)
    print(f"the backbone's {len(before)} tensors are what they were, to the bit: {yes(not changed)}")
    print(f"with every gate shut it is the original model, to the bit: {yes(shut)}")
    return {"moved": changed, "shut_is_backbone": shut}


def learned(recipe: Any, out: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """How the run ended, and what was seen of its gradients."""
    from amor.cli._seeing import as_result, observing
    from amor.run import Run
    from amor.train.loop import train

    with observing(recipe) as (observers, machine):
        ended = as_result(train(recipe, out, observers, "auto", machine))
    seen = [event.now for event in Run(out).read_events() if event.event == "gradients"]
    return ended, seen[-1] if seen else {}


def yes(value: bool) -> str:
    return "yes" if value else "NO"
