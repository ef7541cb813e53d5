"""Train a small AMOR for five minutes, sample from it and see where its gate fired.

  amor demo                      trains by the recipe tiny/demo into runs/demo
  amor demo --minutes 2          as many steps as fit into the time
  amor demo --model mamba2 --out runs/demo-mamba2      another architecture, beside the first
  amor demo --fresh              delete what runs/demo holds and begin again

Then a model of width 64 learns a task that needs attention, where what the gate's choice is worth
can be seen: the last number. With --minutes, --steps or --model the text is all.

The same command again goes on with a demo that was stopped, and shows a finished one without
training it again. The text is the package sotu (the extra `demo`); a BPE of 4,096 tokens is
trained on it on the spot.
"""

import argparse
import math
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from msgspec import structs
from rich.console import Console
from rich.text import Text

from amor import typed
from amor.cli import Parser
from amor.cli._terminal import show_strip
from amor.cli._training import run_result, train_observed
from amor.data import sotu
from amor.data.tasks.base import read_task
from amor.errors import AmorError
from amor.gates.override import override_gates
from amor.judge.gates import own_gates
from amor.judge.recall import recall
from amor.models.folder import load_model
from amor.records.findings import Findings
from amor.records.run import Step
from amor.run import Run
from amor.study import report
from amor.train import loop
from amor.train.checkpoint import listed, step_of
from amor.train.recipe import Recipe, load
from amor.train.watch import number

RECIPE, RECALL_RECIPE = "tiny/demo", "recall/demo"
TIMED = 3  # steps that are timed to fill --minutes
SHOWN = 60  # tokens of the held-out text shown
RECALL = "eight values to remember, asked for among noise"


def arguments(parser: Parser) -> None:
    """The options of the verb."""
    length = parser.add_mutually_exclusive_group()
    words = "train this many steps (default: the recipe's)"
    length.add_argument("--steps", type=int, metavar="N", help=words)
    length.add_argument("--minutes", type=float, metavar="M", help="train for about so long")
    parser.text("--model", "NAME", "another architecture, such as mamba2 or amor-gated-deltanet")
    parser.text("--out", "RUN", "the run directory", "runs/demo")
    parser.flag("--fresh", "delete the demo in RUN and begin again")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Prepare, train, show."""
    if args.minutes is not None and not 0 < args.minutes < math.inf:
        raise AmorError(f"--minutes {args.minutes:g}: give a time above 0, e.g. --minutes 2")
    load_recipe(args, args.steps).config()  # a wrong --steps or --model, before text is prepared
    # a demo of another length or model is the text alone
    both = args.model is None and args.steps is None and args.minutes is None
    print(overview(args, both))
    began = time.perf_counter()
    out = Run(args.out)
    if args.fresh and out.used:
        delete_demo(out)
    prepare_text(out.folder / "data")
    recipe = choose_recipe(args, out)
    announce(out, recipe.total_steps)
    ended = train_observed(recipe, args.out)
    if not ended.done:
        return run_result(ended)
    recalled = None
    if both:
        print(f"now a task that needs attention: {RECALL}")
        recalled = train_recall(out.folder / "recall")
        if recalled is None:  # stopped
            return run_result(ended)
        report.add_recall(out, recalled)
    return run_result(ended) | show(out, time.perf_counter() - began, recalled)


def overview(args: argparse.Namespace, both: bool) -> str:
    """What the demo does, of one task or both, and how long it takes, in one line."""
    steps = f"for {args.steps:,} steps" if args.steps else "for about five minutes"
    length = f"for about {args.minutes:g} minutes" if args.minutes else steps
    text = f"trains a small model on State of the Union addresses {length}"
    recall = ", then one on a recall task for about a minute" if both else ""
    after = "and shows where they attend (times of two free CPU cores; stop and go on any time)"
    return f"amor demo: {text}{recall}, {after}"


def delete_demo(out: Run) -> None:
    """Delete a demo, and nothing that is not one."""
    if (name := out.recipe().name) != Path(RECIPE).stem:
        hint = "which is not a demo; give another --out"
        raise AmorError(f"{out.folder} holds the run {name!r}, {hint}")
    shutil.rmtree(out.folder)
    print(f"{out.folder} is deleted")


def prepare_text(folder: Path) -> None:
    """Prepare the addresses."""
    began = time.perf_counter()
    # 12 MB of text: starting workers takes longer than they save
    train, valid = sotu.prepare_demo(folder, workers=1)
    size = f"{train.tokens:,} tokens in {time.perf_counter() - began:.0f} s"
    print(f"text: {train.manifest.documents} State of the Union addresses, {size}")
    print(f"held out for validation: {valid.manifest.documents} others, {valid.tokens:,} tokens")


def choose_recipe(args: argparse.Namespace, out: Run) -> Recipe:
    """The recipe with the options of the command; a stopped demo keeps its number of steps."""
    before = out.recipe() if out.used else None
    steps = args.steps
    if args.minutes is not None:
        steps = (before.steps if before else 0) or steps_within(load_recipe(args), args.minutes)
    recipe = load_recipe(args, steps)
    kept, wanted = (
        f"model {each.model.name}, steps {each.steps}" for each in (before or recipe, recipe)
    )
    if kept != wanted:
        hint = "--fresh replaces it, or give another --out"
        raise AmorError(f"{out.folder} holds a demo with {kept}, not {wanted}; {hint}")
    return recipe


def load_recipe(args: argparse.Namespace, steps: int | None = None) -> Recipe:
    """The demo's recipe with another model or number of steps."""
    model = [] if args.model is None else [f"model.name={args.model}"]
    recipe = load(RECIPE, model, data=str(Path(args.out) / "data"), steps=steps)
    if not recipe.model.name.endswith("-nogate"):
        return recipe
    # a gate that is always open has no threshold, so it cannot take the recipe's gate options
    options = typed.flat(recipe.model.changes).items()
    changes = {k: value for k, value in options if not k.startswith("blocks.gate_options")}
    return replace(recipe, model=replace(recipe.model, changes=changes))


def steps_within(recipe: Recipe, minutes: float) -> int:
    """How many steps fit into the time, by the fastest of a few steps that are discarded."""
    short = replace(recipe, steps=TIMED, eval=replace(recipe.eval, every=0), verify=False)
    with tempfile.TemporaryDirectory() as folder:
        loop.train(short, folder, [])
        lines = Run(folder).lines()
        seconds = min(line.timing.seconds for line in lines if isinstance(line, Step))
    steps = max(1, round(60 * minutes / seconds))
    print(f"{seconds:.2f} s per step here: {steps:,} steps in about {minutes:g} minutes")
    return steps


def announce(out: Run, steps: int) -> None:
    """Print whether a run begins, goes on or is finished."""
    checkpoints = listed(out) if out.used else []
    if not out.used:
        print(f"a new run of {steps:,} steps in {out.folder}")
    elif checkpoints and step_of(checkpoints[-1]) >= steps:
        print(f"{out.folder} holds a finished demo; here it is again (--fresh trains a new one)")
    else:
        print(f"{out.folder} holds a demo that was stopped; it goes on (--fresh begins again)")


def train_recall(folder: Path) -> dict[str, Any] | None:
    """Train the second task in `folder`, or take what is there; None if it was stopped.

    The share of tokens that fire ("rate"), and the share of right answers with attention where the
    gate fires, on as many tokens by chance, everywhere and never.
    """
    recipe = load(RECALL_RECIPE)
    if not train_observed(recipe, folder, report=False).done:
        return None
    model, task = load_model(folder).eval(), read_task(recipe.task)
    own = recall(model, task)
    questions = own.answers / task.length  # share of tokens that are questions
    rates = [questions * b.questions + (1 - questions) * b.elsewhere for b in own.blocks]
    rate = sum(rates) / len(rates)
    gates = {"chance": f"random:{rate:.4f}", "everywhere": "always", "never": "never"}
    results = {"rate": rate, "gate": typed.tree(own.token)}
    for name, gate in gates.items():
        forced = override_gates(own_gates(model), gate)
        results[name] = typed.tree(recall(model, task, gates=forced).token)
    return results


def show(out: Run, seconds: float, recalled: dict[str, Any] | None) -> dict[str, Any]:
    """What it writes, where its gates fired, what it learned, and what to do next."""
    findings = out.read_findings()
    if findings is None or not findings.texts:
        hint = f"amor report {out.folder} writes it again"
        raise AmorError(f"{out.findings} is gone or holds no texts; {hint}")
    console = Console(highlight=False)

    def section(title: str, lines: Iterable[str] = ()) -> None:
        console.rule(title, align="left")
        for line in lines:
            console.print(line, soft_wrap=True)

    read, *written = findings.texts
    section("What it writes after words it was given")
    for text in written:
        words = [token.text for token in text.tokens]
        prompt = ("".join(words[: text.given]), "bold")
        console.print(Text.assemble(prompt, "".join(words[text.given :])), "")
    if read.blocks:
        section("Where it attends: held-out text, entropy in tenths, ● where a block fired")
        show_strip(console, structs.replace(read, tokens=read.tokens[:SHOWN]))
    section("What it learned", learned(findings))
    if recalled:
        section(f"Where attention is needed: {RECALL}", recall_lines(recalled))
    page = f"[bold]{out.folder}/report.html[/], open it in a browser"
    console.print(f"{seconds / 60:.1f} minutes; report: {page}", soft_wrap=True)
    section("What next", next_commands(out.folder, bool(read.blocks)))
    return {
        "seconds": seconds,
        "judged": findings.judged,
        "unigram": findings.unigram,
        "fire": [block.fire for block in findings.blocks],
        "attention": findings.attention,
        "recall": recalled,
    }


def learned(findings: Findings) -> Iterator[str]:
    """Perplexity on held-out text, firing rates, and what attention saved."""
    own, unigram = findings.judged, findings.unigram
    perplexity = f"[bold]{number(own.perplexity, '.1f')}[/]"
    yield f"held-out perplexity {perplexity} ({number(own.nll)} nats per token)"
    if unigram:
        nll = f"{number(unigram.nll)} nats per token"
        yield f"token frequencies alone: {number(unigram.perplexity, '.0f')} ({nll})"
    if fires := [block.fire for block in findings.blocks]:
        each = ", ".join(f"{fire:.0%}" for fire in fires)
        yield f"attention ran on {sum(fires) / len(fires):.0%} of held-out tokens ({each})"
    if worth := findings.attention:
        gate, chance, everywhere = worth.gate, worth.chance.saved, worth.everywhere.saved
        yield (
            f"that saved [bold]{gate.saved:.3f}[/] ± {gate.se:.3f} nats per token, over all tokens"
            f"; run on as many tokens chosen by chance it saves {chance:.3f}, "
            f"run on all {everywhere:.3f}"
        )


def recall_lines(recalled: dict[str, Any]) -> Iterator[str]:
    """Right answers by where attention ran."""
    names = ("gate", "chance", "everywhere", "never")
    gate, chance, everywhere, never = (f"{recalled[name]['mean']:.0%}" for name in names)
    where = f"attention ran on {recalled['rate']:.0%} of the tokens, where the gate chose"
    yield f"{where}, and [bold]{gate}[/] of the answers were right"
    chosen = f"run on as many tokens chosen by chance {chance}"
    yield f"{chosen}, run on all {everywhere}, run on none {never}"


def next_commands(folder: Path, gated: bool) -> Iterator[str]:
    """Three things to try, and how."""
    text = '--text "My fellow citizens, the state of our union"'
    own = "where does it attend on your words?", f"amor trace {folder} {text}"
    other = "the same with gated attention", "amor demo --out runs/demo-amor"
    backbone = "amor demo --model mamba2 --out runs/demo-mamba2"
    longer = f"amor train {RECIPE} --data {folder}/data --steps 3000 --out runs/longer"
    commands = [own if gated else other]
    commands += [("the backbone alone: what do the gated blocks add?", backbone)]
    commands += [("the same recipe, more of it", longer)]
    yield from (f"[dim]{words}[/]\n  {command}" for words, command in commands)
