"""Questions of an evaluation, scored by `amor eval` and by the harness's own model, in turn.

  python -m benchmarks scoring --quick
  python -m benchmarks scoring --questions 2000 --data SETS

Multiple choice with four answers per question: those of ARC-Easy from a folder (--data, as amor
eval takes it), or random words. The other side is transformers' Mamba2 of at most as many
parameters in the harness's HFLM. Both sides run through the harness, from text to accuracy; models
are untrained, gates fire. Needs the extras `eval` and `peers`, and accelerate.
"""

import argparse
import json
import random
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from amor.bench.table import BenchmarkRow, BenchmarkTable, common, run_rows
from amor.bench.timing import clock, from_rounds
from amor.convert.peer import library
from amor.data.tokenizer import load
from amor.errors import AmorError
from amor.models.build import build
from amor.presets import preset
from amor.vocabulary import vocabulary
from benchmarks import peer_models
from benchmarks.steps import MAMBA2, initialise_gates, parameters

ROWS = ("questions",)
MODELS = ("mamba2", "amor-mamba2")
TASK, BATCH = "arc_easy", 16  # BATCH: requests that HFLM scores at a time
WORDS = (
    *("river", "stone", "light", "morning", "window", "garden", "iron", "winter"),
    *("letter", "paper", "horse", "road", "bread"),
)
MAX_LENGTH = 2048  # tokens of a request of HFLM


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the suite."""
    common(parser, ROWS)
    add = parser.add_argument
    help_ = "how many (default 2000; with --quick 4)"
    add("--questions", type=int, default=2000, metavar="N", help=help_)
    add("--data", metavar="FOLDER", help="folder of arc_easy_test.jsonl (default: random words)")
    add("--tokenizer", default="bytes", help="bytes (default), llama-3.1, or a tokenizer.json")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure, print, and return the table for JSON."""
    library()
    if args.questions < 1:
        raise AmorError(f"--questions {args.questions}: at least one is needed")
    options = args.rounds, 4 if args.quick else args.questions, args.data, args.tokenizer
    return run_rows("scoring", args, ROWS, lambda table, _: [questions(table, *options)])


def questions(
    table: BenchmarkTable, rounds: int, count: int, data: str | None, tokenizer_name: str
) -> BenchmarkRow:
    """Score `count` questions with every model, in turn."""
    from amor.eval import harness, tasks

    tokenizer = load(tokenizer_name)
    vocab = vocabulary(tokenizer)
    ours = {name: build(preset(name, "tiny", vocab=vocab)).eval() for name in MODELS}
    width = 256
    depth = peer_models.mamba2_depth(min(map(parameters, ours.values())), width, vocab)
    theirs = peer_models.mamba2(width, int(depth), vocab).eval()
    ops = ("scan", "conv", "head")
    row = table.row("questions of four answers", *ops, vocab=vocab, width=width)
    every = {**ours, MAMBA2: theirs}
    row.numbers |= {f"parameters, {name}": parameters(model) for name, model in every.items()}
    for name, model in ours.items():
        rates = initialise_gates(model, torch.randint(0, vocab, (4, 65)))
        row.numbers |= {f"{what}, {name}": rate for what, rate in rates.items()}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(data) if data else random_questions(Path(scratch) / "data", count)
        load_task = partial(tasks.load, "common-sense", folder, tokenizer=tokenizer, names=[TASK])
        if skipped := load_task().skipped:
            raise AmorError(f"{TASK}: {skipped[TASK]}")
        count = min(count, load_task().data[TASK].rows)

        def evaluate(lm: Any, most: int) -> None:
            harness.evaluated(lm, load_task().tasks, most, 0, samples=False)

        makers = {name: _fresh(model, tokenizer, Path(scratch)) for name, model in ours.items()}
        fast = peer_models.fast_tokenizer(tokenizer)
        makers[MAMBA2] = lambda: _harness_model(theirs, fast)
        for make in makers.values():
            evaluate(make(), min(count, 4))  # warm-up: compiles and allocates
        seconds: dict[str, list[float]] = {name: [] for name in makers}
        for _ in range(rounds):
            for name, make in makers.items():
                seconds[name].append(clock(partial(evaluate, make(), count)))
    row.times |= {name: from_rounds(each) for name, each in seconds.items()}
    row.numbers["questions"] = count
    for name in ours:
        row.numbers[f"questions/s, {name}"] = count / row.seconds[name]
        row.add_ratio(f"{name} over HFLM with {MAMBA2}", row.times[MAMBA2], row.times[name])
    return row


def _harness_model(model: Any, tokenizer: Any) -> Any:
    """A model of transformers as `lm_eval --model hf` runs it."""
    from lm_eval.models.huggingface import HFLM

    options = {"batch_size": BATCH, "max_length": MAX_LENGTH, "add_bos_token": False}
    return HFLM(pretrained=model, tokenizer=tokenizer, **options)


def _fresh(model: Any, tokenizer: Any, scratch: Path) -> Callable[[], Any]:
    """A function that makes a model as amor eval runs it, with an empty store of answers."""
    from amor.eval.judge import Judge
    from amor.eval.lm import AmorLM
    from amor.eval.store import Store

    def make() -> Any:
        file = Path(tempfile.mkdtemp(dir=scratch)) / "requests.jsonl"
        return AmorLM(Judge(model, tokenizer, "bench", Store(file)))

    return make


def random_questions(folder: Path, count: int) -> Path:
    """Write questions of about as many words as ARC-Easy's into a folder."""
    draw = random.Random(0)

    def some(words: int) -> str:
        return " ".join(draw.choices(WORDS, k=words))

    rows = [
        {
            "question": f"{some(20)}?",
            "choices": {"text": [some(4) for _ in "ABCD"], "label": list("ABCD")},
            "answerKey": "A",
        }
        for _ in range(count)
    ]
    folder.mkdir()
    (folder / f"{TASK}_test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder
