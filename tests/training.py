"""What the laws of training share: a small corpus, small recipes, and a
model's numbers after a run."""

import json
import random
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from laws import SMALL

from amor import typed
from amor.cli import demo
from amor.data import sotu
from amor.data.prepare import Request, prepare
from amor.gates.base import Evidence, MedianGate, Verdict
from amor.records.run import Event, Step
from amor.run import Run
from amor.train.loop import train
from amor.train.recipe import Recipe, find, load
from amor.train.watch import Observer

VOCAB = 257  # bytes and an end of text
# a threshold that follows within a few steps, so that gates fire now and then
# from the first step to the last
QUICK = {"blocks.gate_options": {"eta": 0.5}}
FINAL, ONCE = QUICK | {"blocks.probe": "final"}, QUICK | {"blocks.decide": "once"}
# a gate that predicts gains after the first of its samples that tell of any
GAIN = {
    "blocks.gate": "gain",
    "blocks.decide": "once",
    "blocks.gate_options": {"eta": 0.5, "explore": 4, "rate": 0.4},
}


def corpus(folder: Path, tokenizer: str = "bytes") -> Path:
    """60 documents of invented words, some much more common than others; the same every time."""
    chance = random.Random(0)
    words = [
        "".join(chance.choice("abcdefghijklmnop") for _ in range(chance.randint(2, 6)))
        for _ in range(150)
    ]
    texts = folder / "texts"
    texts.mkdir(parents=True)
    for number in range(60):
        picked = (chance.choice(words[:20] if chance.random() < 0.7 else words) for _ in range(200))
        (texts / f"{number:03d}.txt").write_text(" ".join(picked) + "\n")
    prepare(
        Request(inputs=(str(texts),), tokenizer=tokenizer, valid=0.1), folder / "data", workers=1
    )
    return folder / "data"


def small_recipe(
    data: Path, name: str = "amor-mamba2", changes: Mapping[str, Any] = QUICK, **keys: Any
) -> Recipe:
    """A tiny recipe of an architecture, made smaller: a step takes some hundredths of a second."""
    tree: dict[str, Any] = load(f"tiny/{name}").to_dict()
    gated = name in ("amor-mamba2", "amor-gated-deltanet")
    tree["model"]["changes"] = (
        SMALL | {"vocab": VOCAB, "pattern": pattern(name)} | (changes if gated else {})
    )
    tree |= {"data": str(data), "context": 24, "batch": 4, "micro_batch": 4, "steps": 6}
    tree["lr"]["warmup"] = 2
    tree["eval"] = {"every": 3, "windows": 4}
    tree["checkpoint"] = {"every": 2, "keep_last": 2}
    for key, value in keys.items():
        if isinstance(value, dict):
            tree[key] = tree[key] | value
        else:
            tree[key] = value
    return Recipe.from_dict(tree)


class Lone(MedianGate):
    """The paper's gate in one step, and in the next one that fires on a single token of every
    call: that of the highest score."""

    kind = "lone"
    needs = frozenset({"entropy"})

    def forward(self, evidence: Evidence) -> Verdict:
        assert evidence.entropy is not None
        score = evidence.entropy
        if int(self.updates) % 2:
            return self.judge(score)
        return Verdict(torch.arange(score.numel()).view_as(score) == score.argmax(), score)


def pattern(name: str) -> str:
    """Two layers that hold every mixer of the architecture."""
    base = (
        "gated_deltanet"
        if "gated-deltanet" in name
        else "attention"
        if name == "transformer"
        else "mamba2"
    )
    second = "attention" if "serial" in name else "fused" if "fused" in name else base
    return f"{base}, {second}"


class Watch(Observer):
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.events: list[Event] = []

    def on_step(self, metrics: Step) -> None:
        self.steps.append(metrics)

    def on_event(self, event: Event) -> None:
        self.events.append(event)


class KilledError(BaseException):
    """Stands for kill -9: nothing in the house catches it."""


class Killer(Observer):
    """Ends the run in the middle, without a word, after a step."""

    def __init__(self, step: int):
        self.step = step

    def on_step(self, metrics: Step) -> None:
        if metrics.step == self.step:
            raise KilledError


def trained(recipe: Recipe, out: Path, **options: Any) -> dict[str, Any]:
    """Train, and everything the run left behind that must be the same
    when it is done another way."""
    watch = Watch()
    ended = train(recipe, out, observers=[watch], **options)
    return left_by(out) | {"ended": ended, "watch": watch}


def left_by(out: Path) -> dict[str, Any]:
    """Weights, gate statistics and moments of the newest checkpoint, and the
    metrics without their timing."""
    from safetensors.torch import load_file

    latest = out / "latest"
    lines = [
        {key: value for key, value in typed.tree(line).items() if key != "timing"}
        for line in Run(out).lines()
    ]
    trainer = json.loads((latest / "trainer.json").read_text())
    return {
        "weights": load_file(latest / "model.safetensors"),
        "moments": load_file(latest / "optimizer.safetensors"),
        "metrics": lines,
        "trainer": trainer,
    }


def same(a: dict[str, Any], b: dict[str, Any]) -> None:
    """Two runs left the same bits."""
    assert a["metrics"] == b["metrics"]
    assert a["trainer"] == b["trainer"]
    for what in ("weights", "moments"):
        assert a[what].keys() == b[what].keys()
        wrong = [name for name in a[what] if not torch.equal(a[what][name], b[what][name])]
        assert not wrong, f"{what} differ: {wrong}"


DEMO = """
context = 24
batch = 4
micro_batch = 4
steps = 2
[model.changes]
vocab = 300
pattern = "mamba2, mamba2"
width = 64
d_ff = 96
blocks.gate_options.eta = 0.5
blocks.head_size = 16
mixers.mamba2 = {head_size = 16, state_size = 24}
[lr]
peak = 2e-3
floor = 1e-4
warmup = 1
[eval]
every = 2
windows = 4
[checkpoint]
every = 1
keep_last = 1
"""


def invented_demo(folder: Path, monkeypatch: Any) -> None:
    """The demo as it is, but for the text it reads and the size of what it trains."""
    chance = random.Random(0)
    words = [
        "".join(chance.choice("abcdefgh") for _ in range(chance.randint(2, 7))) for _ in range(200)
    ]
    files = [folder / f"{year}.txt" for year in range(1790, 1820)]
    for file in files:
        file.write_text(
            "Fellow citizens " + " ".join(chance.choice(words) for _ in range(80)) + ".\n"
        )
    monkeypatch.setattr(sotu, "files", lambda: files)
    monkeypatch.setattr(sotu, "prepare_demo", partial(sotu.prepare_demo, vocab=300))
    (folder / "demo.toml").write_text(DEMO)
    monkeypatch.setattr(demo, "RECIPE", str(folder / "demo.toml"))
    task = (
        f"extends = '{find('recall/demo')}'\nsteps = 2\nopen_steps = 1\nbatch = 8\n"
        "micro_batch = 8\neval.windows = 2\n"
    )
    (folder / "recall.toml").write_text(task)
    monkeypatch.setattr(demo, "RECALL_RECIPE", str(folder / "recall.toml"))
