"""Questions of an evaluation, answered by `amor eval` and by lm-evaluation-harness's own model, in turn.

  amor bench scoring --quick
  amor bench scoring --questions 2000 --data SETS

Multiple choice, four answers a question: those of ARC-Easy from a folder (--data, as amor eval takes it), or made of words at
random. The other side is transformers' Mamba2 of at most as many parameters in the harness's HFLM. Both sides answer through the
harness, from text to accuracy; models are untrained, gates fire. Needs the extras `eval` and `peers`, and accelerate.
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

from amor.bench import transformers
from amor.bench.steps import MAMBA2, meet, parameters
from amor.bench.table import Row, Table, common, named
from amor.bench.timing import clock, of_rounds
from amor.data.tokenizer import load
from amor.errors import AmorError
from amor.models.build import build
from amor.presets import preset
from amor.vocabulary import vocabulary

ROWS = ("questions",)
MODELS = ("mamba2", "amor-mamba2")
TASK, AT_A_TIME = "arc_easy", 16  # requests of HFLM at a time
WORDS = ("river", "stone", "light", "morning", "window", "garden", "iron", "winter", "letter", "paper", "horse", "road", "bread")
LONGEST = 2048


def arguments(parser: argparse.ArgumentParser) -> None:
    common(parser, ROWS)
    parser.add_argument("--questions", type=int, default=2000, metavar="N", help="how many (default 2000; with --quick 4)")
    parser.add_argument("--data", metavar="FOLDER", help="where arc_easy_test.jsonl lies (default: made at random)")
    parser.add_argument("--tokenizer", default="bytes", help="bytes (default), llama-3.1, or a tokenizer.json")


def run(args: argparse.Namespace) -> dict[str, Any]:
    transformers.library()
    if args.questions < 1:
        raise AmorError(f"--questions {args.questions}: at least one is needed")
    table = Table.of("scoring", args)
    for name in named(ROWS, args.only):
        table.ask(name)
        count = 4 if args.quick else args.questions
        questions(table, args.rounds, count, args.data, args.tokenizer).show()
    return table.result()


def questions(table: Table, rounds: int, count: int, data: str | None, words: str) -> Row:
    from amor.eval import harness, tasks
    from amor.eval.peer import hflm

    tokenizer = load(words)
    vocab = vocabulary(tokenizer)
    ours = {name: build(preset(name, "tiny", vocab=vocab)).eval() for name in MODELS}
    width, depth = 256, transformers.mamba2_depth(min(map(parameters, ours.values())), 256, vocab)
    theirs = transformers.mamba2(width, int(depth), vocab).eval()
    row = table.row("questions of four answers", "scan", "conv", "head", vocab=vocab, width=width)
    row.found |= {f"parameters, {name}": parameters(model) for name, model in {**ours, MAMBA2: theirs}.items()}
    for name, model in ours.items():
        row.found |= {f"{what}, {name}": rate for what, rate in meet(model, torch.randint(0, vocab, (4, 65))).items()}
    with tempfile.TemporaryDirectory() as scratch:
        made = Path(data) if data else invented(Path(scratch) / "data", count)
        load_task = partial(tasks.load, "common-sense", made, tokenizer=tokenizer, names=[TASK])
        if lacks := load_task().skipped:
            raise AmorError(f"{TASK}: {lacks[TASK]}")
        count = min(count, load_task().data[TASK].rows)

        def answered(lm: Any, most: int) -> None:
            harness.evaluated(lm, load_task().tasks, most, 0, samples=False)

        makers = {name: _fresh(model, tokenizer, Path(scratch)) for name, model in ours.items()}
        makers[MAMBA2] = lambda: hflm(theirs, transformers.fast_tokenizer(tokenizer), AT_A_TIME, LONGEST)
        for make in makers.values():
            answered(make(), min(count, 4))  # the warm-up: builds and allocates
        taken: dict[str, list[float]] = {name: [] for name in makers}
        for _ in range(rounds):
            for name, make in makers.items():
                taken[name].append(clock(partial(answered, make(), count)))
    row.time({name: of_rounds(seconds) for name, seconds in taken.items()})
    row.found["questions"] = count
    for name in ours:
        row.found[f"questions/s, {name}"] = count / row.seconds[name]
        row.ratio(f"{name} over HFLM with {MAMBA2}", row.times[MAMBA2], row.times[name])
    return row


def _fresh(model: Any, tokenizer: Any, scratch: Path) -> Callable[[], Any]:
    """A model as amor eval runs it, with a store that holds nothing."""
    from amor.eval.judge import Judge
    from amor.eval.lm import AmorLM
    from amor.eval.store import Store

    def make() -> Any:
        file = Path(tempfile.mkdtemp(dir=scratch)) / "requests.jsonl"
        return AmorLM(Judge(model, tokenizer, "bench", Store(file)))

    return make


def invented(folder: Path, count: int) -> Path:
    """Questions of about as many words as ARC-Easy's."""
    draw = random.Random(0)

    def some(words: int) -> str:
        return " ".join(draw.choices(WORDS, k=words))

    rows = [
        {"question": f"{some(20)}?", "choices": {"text": [some(4) for _ in "ABCD"], "label": list("ABCD")}, "answerKey": "A"}
        for _ in range(count)
    ]
    folder.mkdir()
    (folder / f"{TASK}_test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder
