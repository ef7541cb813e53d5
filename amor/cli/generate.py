"""Continue a prompt, coloured by how unsure the model is; underlined where attention ran.

  amor generate RUN --prompt "The state of the Union is" --max-tokens 100
  echo "Once upon a time" | amor generate RUN --temperature 0.8 --top-p 0.95
  amor generate RUN --prompt "Fellow citizens" --fire-rate 0.1
  amor generate RUN --batch prompts.txt --out texts.jsonl

A batch file holds one prompt per line; in a .jsonl file each line is a text or an object with a key
"prompt". Several prompts are continued at the same time, and none can change another's text.
docs/decode.md explains the closing line.
"""

import argparse
import json
import math
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO, get_args

import torch

from amor import typed
from amor.cli import Parser
from amor.cli._model import (
    bos_arguments,
    chosen_gates,
    gate_arguments,
    open_trained,
    replace_invalid,
    require_tokenizer,
    trained_arguments,
)
from amor.cli._terminal import shade
from amor.decode.engine import Engine
from amor.decode.generate import ROWS, Draft, GeneratedToken, Generation, Generator
from amor.decode.sample import Sampling
from amor.errors import AmorError
from amor.files import disk_errors, file_to_write
from amor.judge.quantised import quantised_perplexity

MEASURED = 512  # tokens on which the effect of rounded weights is measured


def arguments(parser: Parser) -> None:
    """The options of the verb."""
    trained_arguments(parser)
    parser.repeated("--prompt", "TEXT", "the beginning (default: standard input)")
    parser.text("--batch", "FILE", "a file of prompts, .txt or .jsonl")
    parser.text("--out", "FILE", "write one line of JSON per prompt here")
    parser.number("--max-tokens", 128, "tokens written after each prompt")
    default = Sampling()
    parser.number("--temperature", default.temperature, "0: greedy; 1: as the model has it")
    parser.number("--top-k", default.top_k, "choose among the K best tokens; 0: all")
    words = "only the best tokens of this probability together"
    parser.number("--top-p", default.top_p, words)
    parser.number("--min-p", default.min_p, "only tokens this share as probable as the best")
    words = "above 1: avoid earlier tokens"
    parser.number("--repetition-penalty", default.repetition_penalty, words)
    parser.repeated("--stop", "TEXT", "end before this text")
    parser.repeated("--stop-id", "N", "end at this token id, e.g. the BOS between texts", int)
    bos_arguments(parser)
    parser.number("--seed", default.seed, "of the choices; the same seed gives the same text")
    parser.number("--rows", ROWS, "prompts continued at the same time")
    words = "ngram: read repeated text ahead, several tokens per pass; the text stays the same"
    parser.choice("--draft", get_args(Draft), "none", words)
    gate_arguments(parser)
    parser.text("--weights", "FORMAT", "of the engine: float32, float16, int8, int4", "float32")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Write the texts and the closing line."""
    model, own_tokenizer = open_trained(args)
    tokenizer = require_tokenizer(own_tokenizer)
    prompts = read_prompts(args)
    out = file_to_write(args.out) if args.out else None
    gates = chosen_gates(args, model)
    filters = args.top_k, args.top_p, args.min_p, args.repetition_penalty
    sampling = Sampling(args.temperature, *filters, args.seed)
    engine = Engine(model, weights=args.weights, gates=gates)
    generator = Generator(
        engine,
        tokenizer,
        sampling,
        args.max_tokens,
        args.stop,
        args.rows,
        stop_ids=args.stop_id,
        add_bos=args.bos,
        draft=args.draft,
    )
    texts = [Generation(prompt, generator.encode(prompt)) for prompt in prompts]
    printing = not args.out and not args.json
    live = printing and len(prompts) == 1
    printer = LivePrinter(sys.stdout, math.log(model.config.vocab))
    began = time.perf_counter()
    for piece in generator.run([text.prompt_tokens for text in texts]):
        texts[piece.row].append(piece)
        if live:
            printer.show(piece)
    seconds = time.perf_counter() - began - engine.stats.prompt_seconds
    if printing:
        every = (f"[{number}] {text.prompt}{text.text}" for number, text in enumerate(texts))
        print("" if live else "\n".join(every))
    if out:
        lines = (json.dumps(asdict(text), ensure_ascii=False) + "\n" for text in texts)
        with disk_errors(out):
            out.write_text("".join(lines), encoding="utf-8")
    result = closing_line(engine, texts, seconds)
    if args.weights != "float32":
        result["perplexity"] = rounding_effect(engine, texts[0])
    return result | {"texts": texts if args.json and not args.out else args.out}


def read_prompts(args: argparse.Namespace) -> list[str]:
    """The prompts of the command line, of a file, or of standard input; bytes that are not UTF-8
    become a mark."""
    if args.prompt and args.batch:
        raise AmorError("--prompt and --batch are both given; give one")
    if args.prompt:
        return [replace_invalid(prompt) for prompt in args.prompt]
    if args.batch is None:
        return [sys.stdin.buffer.read().decode("utf-8", "replace")]
    path = Path(args.batch)
    hint = "give a file with one prompt per line"
    if not path.is_file():
        raise AmorError(f"--batch {path}: no such file; {hint}")
    lines = path.read_bytes().decode("utf-8", "replace").split("\n")
    lines = lines[:-1] if lines[-1] == "" else lines
    if not lines:
        raise AmorError(f"--batch {path} is empty; {hint}")
    if path.suffix != ".jsonl":
        return lines
    return [_prompt(line, f"{path}:{number}") for number, line in enumerate(lines, 1)]


def _prompt(line: str, where: str) -> str:
    value = typed.json_tree(line, where)
    prompt = value.get("prompt") if isinstance(value, dict) else value
    if not isinstance(prompt, str):
        raise AmorError(f'{where}: write a text, or an object with a text under "prompt"')
    return prompt


class LivePrinter:
    """Prints text as it is written: the less sure, the warmer; bold and underlined where a block
    fired. Without colours where the output is no terminal."""

    def __init__(self, out: TextIO, most: float):
        """most: the largest entropy, in nats."""
        self.out, self.most = out, most
        self.coloured = out.isatty() and "NO_COLOR" not in os.environ

    def show(self, piece: GeneratedToken) -> None:
        """Print one token."""
        text = piece.text
        if self.coloured and text.strip():
            colour = shade(piece.entropy, 0, self.most)
            red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
            marks = "1;4;" if any(piece.fire) else ""
            text = f"\x1b[{marks}30;48;2;{red};{green};{blue}m{text}\x1b[0m"
        self.out.write(text)
        self.out.flush()


def closing_line(engine: Engine, texts: list[Generation], seconds: float) -> dict[str, Any]:
    """Print the closing line on standard error, so that a pipe gets the text alone."""
    stats = engine.stats
    count = sum(len(t.tokens) for t in texts)
    rate, passes = count / max(seconds, 1e-9), stats.head_passes_per_token
    words = [f"{count} tokens", f"{rate:.1f} tokens/s", f"{passes:.2f} head passes per token"]
    if stats.blocks:
        words.insert(2, "fired " + " ".join(f"{rate:.0%}" for rate in stats.fire_rates))
        words.append(f"{stats.skipped:.0%} of attention skipped")
    if stats.drafted:
        words.append(f"{stats.accepted} of {stats.drafted} draft tokens accepted")
    print(" · ".join(words), file=sys.stderr)
    return {
        "tokens": count,
        "tokens_per_second": rate,
        "fire_rates": stats.fire_rates,
        "head_passes_a_token": passes,
        "attention_skipped": stats.skipped if stats.blocks else None,
        "drafted": stats.drafted,
        "accepted": stats.accepted,
        "path": engine.path,
    }


def rounding_effect(engine: Engine, text: Generation) -> dict[str, float]:
    """What rounded weights cost in perplexity, measured on what was just read and written."""
    ids = text.prompt_tokens + text.tokens
    if len(ids) < 2:
        return {}
    kind, tokens = engine.weights, torch.tensor([ids[:MEASURED]])
    scores = quantised_perplexity(engine.model, tokens, ("float32", kind))
    exact, rounded = scores["float32"], scores[kind]
    change = f"float32 {exact:.4g} ({rounded / exact - 1:+.2%})"
    print(f"{kind}: perplexity {rounded:.4g} of this text, {change}", file=sys.stderr)
    return scores
