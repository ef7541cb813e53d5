"""Put gated blocks behind a trained recurrent model, calibrate them on a text, train them alone.

  amor attach MAMBA2 --out FOLDER --text book.txt               K = 3 blocks, thresholds from a text
  amor attach MAMBA2 --out RUN --data DATA --train-steps 300    and train the blocks alone
  amor attach models/mamba2 --out NEW --blocks 1 --fire-rate 0.2 --data DATA

MAMBA2 is a model folder or run of ours without blocks, or any source of `amor convert`, which is
converted on the way. Until a block has learned something the result computes what the backbone
computes, to the bit. With --train-steps FOLDER is a run directory (stop it any time, the same
command goes on), else a model folder. docs/how-to/attach.md walks through it.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from amor.attach.blocks import AttachOptions, attached, check_backbone, table, write, write_start
from amor.attach.proof import judged, moved, same_output
from amor.attach.text import adapts, calibrate, calibration
from amor.cli import Parser
from amor.cli._training import run_result, train_observed
from amor.config import CHOICES
from amor.convert.compare import compare
from amor.convert.opened import Opened, open_model, open_source, source_config
from amor.errors import AmorError
from amor.files import require_empty
from amor.models.amor import Amor
from amor.models.folder import load_model
from amor.run import Run
from amor.train.recipe import Recipe, load
from amor.train.watch import number

RECIPE = "attach/blocks"
START = "start"  # in the run directory: the attached model before its first step


def arguments(parser: Parser) -> None:
    """The options of the verb."""
    parser.argument("backbone", "BACKBONE", "a model without blocks, or a source of amor convert")
    parser.required("--out", "FOLDER", "where the result goes")
    parser.number("--blocks", 3, "gated blocks")
    parser.text("--gate", "KIND", "one of amor/gates; entropy is the paper's", "entropy")
    parser.number("--fire-rate", None, "share of tokens (default: the gate's own rule)", float)
    parser.number("--head-size", 64, "of the blocks' attention")
    parser.choice("--probe", CHOICES["probe"], "block", "what gates read the head for")
    parser.text("--text", "FILE", "a text to calibrate thresholds on (default: DATA/train)")
    parser.text("--data", "DATA", "prepared data: train/ to learn from, valid/ to judge by")
    parser.number("--train-steps", 0, "train for this many steps")
    words = "train the blocks alone (default), or everything"
    freeze = argparse.BooleanOptionalAction
    parser.add_argument("--freeze", action=freeze, default=True, help=words)
    parser.text("--recipe", "RECIPE", "of the training", RECIPE)
    parser.repeated("--set", "KEY=VALUE", "change a key of the recipe, e.g. lr.peak=1e-3")
    parser.number("--vocab", None, "keep the first N tokens of the vocabulary: the rest is padding")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Convert, attach, calibrate, and train or write."""
    steps = args.train_steps if args.train_steps > 0 else None
    freeze = "backbone" if args.freeze else "none"
    recipe = load(args.recipe, args.set, data=args.data or None, steps=steps, freeze=freeze)
    blocks = AttachOptions(args.blocks, args.gate, args.fire_rate, args.head_size, args.probe)
    blocks.keys()
    check_options(args)
    check_backbone(source_config(*open_source(args.backbone)))
    opened = open_model(args.backbone, args.vocab)
    result = compare_converted(opened)
    if not result.get("ok", True):
        return result
    model = attached(opened.model, blocks, recipe.seed)
    kind = model.config.blocks.gate
    result |= {"blocks": args.blocks, "gate": kind, "frozen": args.freeze, "out": args.out}
    result |= calibrate_blocks(args, recipe, opened, model)
    if not result["ok"]:
        return result
    if args.train_steps:
        return result | train(args, recipe, opened, model)
    write(opened, model, Path(args.out))
    print(f"written: {args.out}")
    return result


def check_options(args: argparse.Namespace) -> None:
    """Errors of the options alone, before a model is read."""
    if not args.data and not args.text:
        hint = "give --text FILE, or --data FOLDER written by `amor prepare`"
        raise AmorError(f"thresholds are calibrated on a text; {hint}")
    if args.train_steps < 0:
        raise AmorError(f"--train-steps {args.train_steps}: give 0 or more")
    if args.train_steps and not args.data:
        raise AmorError("--train-steps needs --data FOLDER, written by `amor prepare`")
    if not args.train_steps:
        require_empty(args.out)


def compare_converted(opened: Opened) -> dict[str, Any]:
    """Compare a source of another library with the model it was converted to."""
    config = opened.model.config
    shape = f"{len(config.pattern)} layers, width {config.width}, vocabulary {config.vocab:,}"
    print(f"{opened.folder}: {opened.title}, {shape}")
    for note in opened.notes:
        print(f"note: {note}")
    if opened.layout is None:
        return {"source": opened.title}
    same = compare(opened, Opened(opened.model, None, opened.folder))
    print(same)
    return {"source": opened.title, "ok": same.ok, "compared": same}


def calibrate_blocks(
    args: argparse.Namespace, recipe: Recipe, opened: Opened, model: Amor
) -> dict[str, Any]:
    """Set thresholds on the text, and check that outputs are still those of the backbone."""
    windows = calibration(opened, args.data, args.text, recipe.context, recipe.eval.windows)
    blocks = model.config.blocks
    kind = f"gate {blocks.gate}, heads of {blocks.head_size}"
    print(f"{blocks.count} gated blocks behind it ({kind}), and no final norm")
    print("\n".join(table(model, str(opened.folder), args.freeze)))
    same = same_output(opened.model, model, windows, closed=False)
    print(f"at step 0 its outputs are the backbone's, to the bit: {yes(same)}")
    if not adapts(model):
        return {"ok": same, "thresholds": []}
    thresholds = calibrate(model, windows)
    each = (f"{t['threshold']:.3f} (fires on {100 * (t['fire'] or 0):.0f} %)" for t in thresholds)
    source = f"{windows.tokens.numel():,} tokens of {windows.source}"
    print(f"thresholds from {source}: {', '.join(each)}")
    # now with gates that fire, which changes nothing yet
    same = same and same_output(opened.model, model, windows, closed=False)
    return {"ok": same, "thresholds": thresholds}


def train(args: argparse.Namespace, recipe: Recipe, opened: Opened, model: Amor) -> dict[str, Any]:
    """Train, and compare the result with the backbone."""
    out = Path(args.out)
    write_start(opened, model, out / START)
    start = replace(recipe.model, name=model.config.name, scale="", start=str(out / START))
    recipe = replace(recipe, name=out.name, model=start)
    before = judged(opened.model, recipe)
    on = f"{before['tokens']:,} tokens"
    print(f"held-out perplexity before: {number(before['perplexity'])} on {on}")
    ended = train_observed(recipe, args.out)
    if not ended.done:
        return run_result(ended)
    trained = load_model(args.out).eval()
    after = judged(trained, recipe)
    fires = ", ".join(f"{fire:.0%}" for fire in after["fire"])
    attention = f"attention on {fires} of the tokens"
    print(f"held-out perplexity after:  {number(after['perplexity'])}, {attention}")
    events = [event.now for event in Run(args.out).read_events() if event.event == "gradients"]
    gradients = events[-1] if events else {}
    frozen = check_frozen(opened, trained, recipe) if args.freeze else {}
    result = {"before": before, "after": after, "steps": ended.step, "gradients": gradients}
    wrong = (gradients.get("silent"), gradients.get("missing"), frozen.get("moved"))
    return result | frozen | {"ok": not any(wrong) and frozen.get("shut_is_backbone", True)}


def check_frozen(opened: Opened, model: Amor, recipe: Recipe) -> dict[str, Any]:
    """Whether the backbone is unchanged: its tensors, and its outputs with every gate shut."""
    before = opened.model.state_dict()
    changed = moved(before, model)
    windows = calibration(opened, recipe.data, None, recipe.context, recipe.eval.windows)
    shut = same_output(opened.model, model, windows, closed=True)
    print(f"the backbone's {len(before)} tensors are unchanged, to the bit: {yes(not changed)}")
    print(f"with every gate shut it is the original model, to the bit: {yes(shut)}")
    return {"moved": changed, "shut_is_backbone": shut}


def yes(value: bool) -> str:
    """A result that must be true; a wrong one stands out."""
    return "yes" if value else "NO"
