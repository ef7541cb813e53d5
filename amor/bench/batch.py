"""Decode steps of several rows and prefill, for every weight format; beside another program where one is named.

  amor bench batch --models mamba2 --weights float32,int4 --batches 1,8
  amor bench batch --beside ./their-rows.sh

Models are 12 layers of width 768 over 128,256 words: `mamba2` without MLPs, and `llama`, the preset transformer. A round of
decode is some steps of all rows after a prompt of 16 tokens, random tokens, the logits of every row computed; a round of prefill
is one prompt, the logits of its last token. With --beside COMMAND each of our rounds is followed by one of
`COMMAND MODEL FORMAT MODE` (MODE is decode:ROWS:STEPS or prefill:TOKENS), which prints one line of JSON with tok_s_best, the
tokens a second of its best repetition; the ratio of the two is then reported. Prefill reads with float32 weights in every format.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from amor.bench.table import Row, Table
from amor.bench.timing import Times, clock, of_rounds
from amor.decode.engine import Engine
from amor.errors import AmorError, nearest
from amor.models.amor import Amor
from amor.models.build import build
from amor.ops.product import FORMATS
from amor.presets import preset

PROMPT = 16
STEPS = {1: 32, 8: 16, 32: 8}  # of a round, by rows
ROWS = ("decode", "prefill")


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--models", default="mamba2,llama", help="with commas (default mamba2,llama)")
    add("--weights", default=",".join(FORMATS), help=f"formats, with commas (default {','.join(FORMATS)})")
    add("--batches", default="1,8,32", help="rows decoded together, with commas (default 1,8,32)")
    add("--prefill", default="512", help="tokens of a prompt, with commas; nothing: none (default 512)")
    add("--rounds", type=int, default=5, help="rounds a side (default 5)")
    add("--beside", metavar="COMMAND", help="another program whose rows take turns with ours")
    add("--quick", action="store_true", help="small models, to see that everything runs; no bar is judged")


def run(args: argparse.Namespace) -> dict[str, Any]:
    table = Table("batch", args.quick)
    batches, prompts = counts("--batches", args.batches), counts("--prefill", args.prefill)
    for name in args.models.split(","):
        model = made(name, args.quick)
        for weights in args.weights.split(","):
            engine = Engine(model, weights=weights)
            table.ask("decode")
            for rows in batches:
                steps = STEPS.get(rows, 8)
                work: Callable[[], Any] = decoding(engine, rows, steps)
                measure(table, args, name, weights, f"decode:{rows}:{steps}", work, rows * steps)
            table.ask("prefill")
            for tokens in prompts:
                work = partial(engine.prefill, [torch.randint(0, model.config.vocab, (tokens,)).tolist()])
                measure(table, args, name, weights, f"prefill:{tokens}", work, tokens)
    return table.result()


def counts(option: str, text: str) -> list[int]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not all(word.isdigit() and int(word) for word in words):
        raise AmorError(f"{option} {text}: give whole numbers of at least 1, with commas, e.g. 1,8,32")
    return [int(word) for word in words]


def made(name: str, quick: bool) -> Amor:
    shapes: dict[str, tuple[str, dict[str, Any]]] = {
        "mamba2": ("mamba2", {"d_ff": 0, "pattern": {"mamba2": 2 if quick else 12}}),
        "llama": ("transformer", {"pattern": {"attention": 2 if quick else 12}}),
    }
    if name not in shapes:
        raise AmorError(f"--models: no {name!r}; {nearest(name, shapes)}")
    base, changes = shapes[name]
    return build(preset(base, "tiny" if quick else "180m", **changes)).eval()


def decoding(engine: Engine, rows: int, steps: int) -> Callable[[], None]:
    """A round of steps; keys are given up after it, so that every round is at the same context."""
    session = engine.prefill([[1] * PROMPT] * rows, room=steps)
    tokens = torch.randint(0, engine.model.config.vocab, (steps, rows))

    def run() -> None:
        round_ = session.fork()
        for column in tokens:
            round_.step(column)

    return run


def measure(
    table: Table, args: argparse.Namespace, name: str, weights: str, mode: str, work: Callable[[], Any], tokens: int
) -> Row:
    row = table.row(mode.split(":")[0], "product", model=name, weights=weights, mode=mode)
    work()  # compiles and allocates
    mine, theirs = [], []
    for _ in range(args.rounds):
        mine.append(clock(work))
        if args.beside:
            theirs.append(tokens / beside(args.beside, name, weights, mode))
    row.time({"amor": of_rounds(mine)})
    row.found[f"tokens/s, {name} {weights} {mode}"] = tokens / min(mine)
    if theirs:
        row.time({"beside": of_rounds(theirs)})
        row.found[f"tokens/s beside, {name} {weights} {mode}"] = tokens / min(theirs)
        taken: dict[str, Times] = row.times
        row.ratio(f"{name} {weights} {mode} over the other", taken["beside"], taken["amor"])
    row.show()
    return row


def beside(command: str, name: str, weights: str, mode: str) -> float:
    """Tokens a second of the other program."""
    words = [*shlex.split(command), name, weights, mode]
    said = subprocess.run(words, capture_output=True, text=True, check=False)
    try:
        return float(json.loads(said.stdout.strip().splitlines()[-1])["tok_s_best"])
    except (IndexError, KeyError, TypeError, ValueError) as error:
        words_said = (said.stderr or said.stdout).strip().splitlines()[-1:] or ["nothing"]
        raise AmorError(
            f"--beside {' '.join(words)} printed no line of JSON with tok_s_best ({error}): {words_said[0]}"
        ) from None
