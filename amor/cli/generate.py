"""Write on after a prompt, token by token, coloured by how unsure the model is; tokens that used attention are underlined.

  amor generate RUN --prompt "The state of the Union is" --max-tokens 100
  echo "Once upon a time" | amor generate RUN --temperature 0.8 --top-p 0.95
  amor generate RUN --prompt "Fellow citizens" --fire-rate 0.1
  amor generate RUN --batch prompts.txt --out texts.jsonl

A batch file holds a prompt a line; in a .jsonl file each line is a text or an object with a key "prompt". Several prompts
are written at the same time, and none can change another's text. docs/decode.md tells what the closing line says.
"""

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from amor import typed
from amor.cli._model import as_text, opened
from amor.errors import AmorError
from amor.files import disk_errors, file_to_write

if TYPE_CHECKING:
    from amor.decode.engine import Engine
    from amor.decode.generate import GeneratedToken, Generation

MEASURED = 512  # tokens on which the effect of rounded weights is measured


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("name", nargs="?", metavar="MODEL", help="a model folder, or a run (its latest model)")
    add("--model", metavar="MODEL", help="the same, as an option")
    add("--tokenizer", help="for a model folder without one: bytes, llama-3.1, or a tokenizer.json")
    add("--prompt", action="append", metavar="TEXT", help="the beginning; may be repeated (default: standard input)")
    add("--batch", metavar="FILE", help="a file of prompts, .txt or .jsonl")
    add("--out", metavar="FILE", help="write a line of JSON a prompt here")
    add("--max-tokens", type=int, default=128, metavar="N", help="tokens written after each prompt (default 128)")
    add(
        "--temperature",
        type=float,
        default=0.8,
        metavar="T",
        help="0: always the best token; 1: as the model says; between: surer (default 0.8)",
    )
    add("--top-k", type=int, default=0, metavar="K", help="choose among the K best tokens (default 0: all)")
    add(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="choose among the best tokens that together hold this probability (default 1: all)",
    )
    add(
        "--min-p",
        type=float,
        default=0.0,
        metavar="P",
        help="choose among tokens at least this share as probable as the best (default 0: all)",
    )
    add(
        "--repetition-penalty",
        type=float,
        default=1.0,
        metavar="X",
        help="above 1: make tokens met before less likely (default 1)",
    )
    add("--stop", action="append", default=[], metavar="TEXT", help="end before this text; may be repeated")
    add("--seed", type=int, default=0, metavar="N", help="of the choices; the same seed gives the same text (default 0)")
    add("--rows", type=int, default=8, metavar="N", help="prompts written at the same time (default 8)")
    add("--fire-rate", type=float, metavar="SHARE", help="fire on this share of tokens, 0 to 1, by the entropies met in training")
    add("--gate", metavar="KIND", help="another gate: always, never or random:SHARE, e.g. random:0.3")
    add(
        "--weights",
        default="float32",
        metavar="FORMAT",
        help="float32 (default), or float16, int8 or int4: a half, a quarter or a seventh of the memory read a token",
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    from amor.decode.engine import Engine
    from amor.decode.generate import Generation, stream
    from amor.decode.sample import Sampling
    from amor.gates.override import override_gates

    model, tokenizer = opened(args)
    if tokenizer is None:
        raise AmorError("the model folder holds no tokenizer.json; name one with --tokenizer")
    prompts = given(args)
    out = file_to_write(args.out) if args.out else None
    gates = override_gates([block.gate for block in model.each_block()], args.gate, args.fire_rate)
    sampling = Sampling(args.temperature, args.top_k, args.top_p, args.min_p, args.repetition_penalty, args.seed)
    engine = Engine(model, weights=args.weights, gates=gates)
    texts = [Generation(prompt) for prompt in prompts]
    began = time.perf_counter()
    pieces = stream(engine, tokenizer, prompts, max_tokens=args.max_tokens, stop=args.stop, rows=args.rows, sampling=sampling)
    shown = None if args.out or args.json else Live(sys.stdout, math.log(model.config.vocab)) if len(prompts) == 1 else None
    gather(pieces, texts, shown)
    seconds = time.perf_counter() - began - engine.stats.prompt_seconds
    if shown is None and not args.json and not args.out:
        show_all(texts)
    if out:
        write(out, texts)
    found = closing(engine, texts, seconds)
    if args.weights != "float32":
        found["perplexity"] = effect(engine, tokenizer, texts)
    return found | {"texts": [asdict(t) for t in texts] if args.json and not args.out else args.out}


def given(args: argparse.Namespace) -> list[str]:
    """The prompts of the command line, of a file, or of standard input; bytes that are no text become a mark."""
    if args.prompt and args.batch:
        raise AmorError("--prompt and --batch are both given; give one")
    if args.prompt:
        return [as_text(prompt) for prompt in args.prompt]
    if args.batch is None:
        return [sys.stdin.buffer.read().decode("utf-8", "replace")]
    path = Path(args.batch)
    if not path.is_file():
        raise AmorError(f"--batch {path}: no such file; give a file with a prompt a line")
    lines = path.read_bytes().decode("utf-8", "replace").split("\n")
    lines = lines[:-1] if lines[-1] == "" else lines
    if not lines:
        raise AmorError(f"--batch {path} is empty; give a file with a prompt a line")
    if path.suffix != ".jsonl":
        return lines
    return [_prompt(line, f"{path}:{number}") for number, line in enumerate(lines, 1)]


def _prompt(line: str, where: str) -> str:
    held = typed.json_tree(line, where)
    prompt = held.get("prompt") if isinstance(held, dict) else held
    if not isinstance(prompt, str):
        raise AmorError(f'{where}: write a text, or an object with a text under "prompt"')
    return prompt


class Live:
    """Text on its way to the terminal: the less sure, the warmer; bold and underlined where a block fired. Plain elsewhere."""

    def __init__(self, out: TextIO, most: float):
        self.out, self.most = out, most
        self.coloured = out.isatty() and "NO_COLOR" not in os.environ

    def show(self, piece: "GeneratedToken") -> None:
        self.out.write(self.painted(piece) if self.coloured and piece.text.strip() else piece.text)
        self.out.flush()

    def painted(self, piece: "GeneratedToken") -> str:
        from amor.cli._strip import shade

        colour = shade(piece.entropy, 0, self.most)
        red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
        marks = "1;4;" if any(piece.fire) else ""
        return f"\x1b[{marks}30;48;2;{red};{green};{blue}m{piece.text}\x1b[0m"


def gather(pieces: Iterable["GeneratedToken"], texts: list["Generation"], live: Live | None) -> None:
    for piece in pieces:
        texts[piece.row].append(piece)
        if live is not None:
            live.show(piece)
    if live is not None:
        print()


def show_all(texts: list["Generation"]) -> None:
    for number, text in enumerate(texts):
        print(f"[{number}] {text.prompt}{text.text}")


def write(path: Path, texts: list["Generation"]) -> None:
    with disk_errors(path):
        path.write_text("".join(json.dumps(asdict(t), ensure_ascii=False) + "\n" for t in texts), encoding="utf-8")


def closing(engine: "Engine", texts: list["Generation"], seconds: float) -> dict[str, Any]:
    """The closing line, on standard error so that a pipe gets the text alone."""
    tally = engine.stats
    count = sum(len(t.tokens) for t in texts)
    found = {
        "tokens": count,
        "tokens_per_second": count / max(seconds, 1e-9),
        "fire_rates": tally.fire_rates,
        "head_passes_a_token": tally.head_passes_per_token,
        "attention_skipped": tally.skipped if tally.blocks else None,
        "path": engine.path,
    }
    words = [f"{count} tokens", f"{found['tokens_per_second']:.1f} tokens/s"]
    if tally.blocks:
        words.append("fired " + " ".join(f"{rate:.0%}" for rate in tally.fire_rates))
    words.append(f"{tally.head_passes_per_token:.2f} head passes a token")
    if tally.blocks:
        words.append(f"{tally.skipped:.0%} of attention skipped")
    print(" · ".join(words), file=sys.stderr)
    return found


def effect(engine: "Engine", tokenizer: Any, texts: list["Generation"]) -> dict[str, float]:
    """What rounded weights cost in perplexity, measured on what was just read and written."""
    import torch

    from amor.judge.quantised import quantised_perplexity

    ids = tokenizer.encode(texts[0].prompt, add_special_tokens=False).ids + texts[0].tokens
    if len(ids) < 2:
        return {}
    kind = engine.weights
    found = quantised_perplexity(engine.model, torch.tensor([ids[:MEASURED]]), ("float32", kind))
    change = found[kind] / found["float32"] - 1
    print(f"{kind}: perplexity {found[kind]:.4g} of this text, float32 {found['float32']:.4g} ({change:+.2%})", file=sys.stderr)
    return found
