"""Put gated blocks behind a pretrained recurrent model, calibrate them on a text, and train the blocks alone.

  amor attach MAMBA2 --out FOLDER --text book.txt                         K = 3 blocks, thresholds from a text; nothing is trained
  amor attach MAMBA2 --out RUN --data DATA --train-steps 300              and the blocks trained, the backbone frozen to the bit
  amor attach RUN --out NEW --blocks 1 --fire-rate 0.2 --data DATA        one block that fires on a fifth of the tokens

MAMBA2 is a model folder or run of ours without blocks, or any source of `amor convert`, which is converted on the way. Until a
block has learned something the result says what the backbone says, to the bit. With --train-steps FOLDER is a run directory
(stop it any time, the same command goes on), else a model folder. docs/how-to/attach.md walks through it.
"""

from __future__ import annotations

import argparse
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from amor.config import CHOICES
from amor.errors import AmorError

if TYPE_CHECKING:
    from amor.convert.opened import Opened
    from amor.data.loader import Windows
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
    from amor.attach import Asked, attached
    from amor.convert.opened import open_model

    recipe = recipe_of(args)
    asked = Asked(args.blocks, args.gate, args.fire_rate, args.head_size, args.probe)
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
    from amor.files import free_folder

    if not args.data and not args.text:
        raise AmorError("thresholds are calibrated on a text; give --text FILE, or --data FOLDER written by `amor prepare`")
    if args.train_steps < 0:
        raise AmorError(f"--train-steps {args.train_steps}: give 0 or more")
    if args.train_steps and not args.data:
        raise AmorError("--train-steps needs --data FOLDER, written by `amor prepare`")
    if not args.train_steps:
        free_folder(args.out)


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
    from amor.attach import adapts, calibrate, same_said, table

    windows = calibration(args, recipe, opened)
    blocks = model.config.blocks
    print(f"{blocks.count} gated blocks behind it (gate {blocks.gate}, heads of {blocks.head_size}), and no final norm")
    print("\n".join(table(model, str(opened.folder), args.freeze)))
    found: dict[str, Any] = {"ok": same_said(opened.model, model, windows, closed=False)}
    print(f"at step 0 it says what the backbone says, to the bit: {yes(found['ok'])}")
    if not adapts(model):
        return found | {"thresholds": []}
    found["thresholds"] = calibrate(model, windows)
    told = [f"{t['threshold']:.3f} (fires on {100 * t['fire']:.0f} %)" for t in found["thresholds"]]
    print(f"thresholds from {windows.tokens.numel():,} tokens of {windows.source}: {', '.join(told)}")
    found["ok"] = found["ok"] and same_said(opened.model, model, windows, closed=False)  # gates that fire change nothing yet
    return found


def calibration(args: argparse.Namespace, recipe: Any, opened: Opened) -> Windows:
    """Windows of the text that thresholds are set by."""
    from amor.judge.windows import encode, of_ids, of_shards
    from amor.typed import read_text

    tokenizer, count = opened.tokenizer(), recipe.eval.windows
    if args.data:
        fits(args, opened)
    if not args.text:
        return of_shards(Path(args.data) / "train", recipe.context, count, None, opened.model.config.vocab, False)
    if tokenizer is None:
        raise AmorError(
            f"{opened.folder} holds no tokenizer.json to read {args.text} with; give prepared --data instead of --text"
        )
    ids = encode(tokenizer, read_text(Path(args.text)))
    if len(ids) and int(ids.max()) >= opened.model.config.vocab:
        raise AmorError(
            f"{args.text}: the tokenizer knows tokens that the model does not, up to {int(ids.max())}; they cannot be read"
        )
    return of_ids(ids, recipe.context, count, args.text)


def fits(args: argparse.Namespace, opened: Opened) -> None:
    """Data made with another tokenizer means other words by the same ids."""
    from amor.attach import same_words
    from amor.convert.compare import TEXT
    from amor.data.shards import splits

    shards, _ = splits(args.data)
    shards.check(opened.model.config.vocab)
    own, theirs = opened.tokenizer(), shards.tokenizer()
    if own is None:
        print("note: the backbone has no tokenizer.json, so that the data was made with its tokens is taken on trust")
    elif not same_words(own, theirs, TEXT):
        raise AmorError(
            f"{args.data} was prepared with another tokenizer than {opened.folder} has; "
            f"prepare it with --tokenizer {opened.folder / 'tokenizer.json'}"
        )


def untrained(args: argparse.Namespace, recipe: Any, opened: Opened, model: Amor) -> dict[str, Any]:
    found = prepared(args, recipe, opened, model)
    write(opened, model, Path(args.out))
    print(f"written: {args.out}")
    return found | {"out": args.out}


def write(opened: Opened, model: Amor, folder: Path) -> None:
    from amor.files import whole_folder
    from amor.models.folder import save

    with whole_folder(folder) as beside:
        save(model, beside)
        for path in opened.tokenizer_files:
            shutil.copyfile(path, beside / path.name)


def trained(args: argparse.Namespace, recipe: Any, opened: Opened, model: Amor) -> dict[str, Any]:
    """Train by the one trainer there is, and compare what it leaves with what was there."""
    from amor.attach import same_said, unchanged
    from amor.models.folder import load_model

    found = prepared(args, recipe, opened, model)
    start = Path(args.out) / START
    begun(opened, model, start)
    recipe = replace(
        recipe, name=Path(args.out).name, model=replace(recipe.model, name=model.config.name, scale="", start=str(start))
    )
    before = judged(opened.model, recipe)
    print(f"held-out perplexity before: {before['perplexity']:.3f} on {before['tokens']:,} tokens")
    ended, gradients = learned(recipe, args.out)
    if not ended["done"]:
        return found | ended
    after_model = load_model(args.out).eval()
    after = judged(after_model, recipe)
    fires = ", ".join(f"{fire:.0%}" for fire in after["fire"])
    print(f"held-out perplexity after:  {after['perplexity']:.3f}, attention on {fires} of the tokens")
    found |= {"before": before, "after": after, "out": args.out, "steps": ended["step"], "gradients": gradients}
    ok = found["ok"] and not gradients.get("silent") and not gradients.get("missing")
    if args.freeze:
        moved = unchanged(opened.model.state_dict(), after_model)
        shut = same_said(opened.model, after_model, calibration(args, recipe, opened), closed=True)
        print(f"the backbone's {len(opened.model.state_dict())} tensors are what they were, to the bit: {yes(not moved)}")
        print(f"with every gate shut it is the original model, to the bit: {yes(shut)}")
        found |= {"moved": moved, "shut_is_backbone": shut}
        ok = ok and shut and not moved
    return found | {"ok": ok}


def begun(opened: Opened, model: Amor, start: Path) -> None:
    """The model before its first step, written, or there from an earlier call of the same command."""
    from amor.models.folder import load_config

    if not (start / "config.json").is_file():
        write(opened, model, start)
    elif load_config(start) != model.config:
        raise AmorError(f"{start.parent} holds blocks of another kind or backbone; give another --out")


def judged(model: Amor, recipe: Any) -> dict[str, Any]:
    """On the windows that a run of the recipe is judged by."""
    from amor import typed
    from amor.judge.evaluate import evaluate
    from amor.judge.windows import Drawn
    from amor.train.data import Data
    from amor.train.distributed import Team, pick_device
    from amor.train.step import boundary

    held = Data.open(replace(recipe, verify=False), Team(pick_device("cpu")))
    if held.valid is None:
        raise AmorError(f"{recipe.data} holds no valid/ split to judge by; prepare it with --valid, e.g. --valid 0.05")
    text = Drawn(held.valid, 0, held.valid.batch, boundary(recipe.documents, held.end_of_text))
    return dict(typed.tree(evaluate(model.eval(), text, recipe.micro_batch)))


def learned(recipe: Any, out: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """How the run ended, and what was seen of its gradients."""
    from amor.cli._seeing import seeing, told
    from amor.run import Run
    from amor.train.loop import train

    with seeing(recipe) as (observers, machine):
        ended = told(train(recipe, out, observers, "auto", machine))
    seen = [event.now for event in Run(out).read_events() if event.event == "gradients"]
    return ended, seen[-1] if seen else {}


def yes(value: bool) -> str:
    return "yes" if value else "NO"
