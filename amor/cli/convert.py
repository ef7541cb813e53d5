"""Turn a model of another library into ours, or ours into theirs, and compare their outputs.

  amor convert SOURCE --out FOLDER                             another library's model -> ours
  amor convert AUTHORS --out OURS --tokenizer tokenizer.json   the AMOR authors' code -> ours
  amor convert OURS --out THEIRS --to authors                  ours -> a folder for their code
  amor convert RUN --out HF --to hf                            ours -> AutoModelForCausalLM
  amor convert models/transformer --out LLAMA --to llama       ours -> another library's layout

SOURCE is a local folder as it is published: config.json, and safetensors or .bin files
(transformers Mamba2, state-spaces Mamba2, fla Gated DeltaNet, Llama), a checkpoint file of llama2.c
with its tokenizer.bin, or a model folder or run of ours. What our skeleton cannot do is refused
with the reason. The result is read back and compared with the source, run by its own library (or,
where that cannot run on a CPU, written out in float64); if they differ nothing is written and the
exit code is 1.
docs/how-to/convert.md has more.
"""

from __future__ import annotations

import argparse
import re
from typing import Any

from amor.cli import Parser
from amor.convert.compare import compare
from amor.convert.opened import Opened, layout_of, open_model, targets
from amor.convert.write import write
from amor.data.tokenizer import load as load_tokenizer
from amor.errors import AmorError, nearest
from amor.files import atomic_folder, require_empty
from amor.models.folder import MODEL_TYPE
from amor.vocabulary import prefix_ids

UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}


class DiffersError(Exception):
    """The outputs of the result are not those of the source."""


def arguments(parser: Parser) -> None:
    """The options of the verb."""
    parser.argument("source", "SOURCE", "a published model, a model folder or a run of ours")
    parser.required("--out", "FOLDER", "the new folder")
    parser.text("--to", "LAYOUT", f"one of {', '.join(targets())}", "amor")
    parser.number("--vocab", None, "keep the first N tokens of the vocabulary: the rest is padding")
    parser.text("--tokenizer", "NAME", "to put beside it: a tokenizer.json, llama-3.1 or bytes")
    parser.text("--shard-size", "SIZE", "largest weight file, e.g. 5GB, of --to authors or hf")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Convert, read back, compare, and write where both agree."""
    if args.to not in targets():
        raise AmorError(f"--to {args.to[:80]}: no such layout; {nearest(args.to[:80], targets())}")
    shard = shard_bytes(args.shard_size, args.to)
    require_empty(args.out)
    tokenizer = None if args.tokenizer is None else load_tokenizer(args.tokenizer)
    opened = open_model(args.source, args.vocab, tokenizer)
    result = describe(opened, args.to)
    try:
        with atomic_folder(args.out) as folder:
            for note in write(opened, args.to, folder, shard):
                print(f"note: {note}")
            same = compare(opened, open_model(folder))
            print(same)
            if not same.ok:
                raise DiffersError
    except DiffersError:
        print(f"{args.out} was not written")
    else:
        print(f"written: {args.out}")
    return result | {"ok": same.ok, "out": str(args.out), "compared": same}


def shard_bytes(words: str | None, to: str) -> int | None:
    """ "5GB" -> 5,000,000,000."""
    if words is None:
        return None
    sharded = [n for n in targets() if n == "hf" or (n != MODEL_TYPE and layout_of(n).sharded)]
    if to not in sharded:
        raise AmorError(f"--shard-size is for --to {' or '.join(sharded)}; {to} is one file")
    match = re.fullmatch(r"(\d{1,6})(KB|MB|GB)", words, re.IGNORECASE)
    if not match or not int(match[1]):
        raise AmorError(f"--shard-size {words[:80]}: write it like 500MB or 5GB")
    return int(match[1]) * UNITS[match[2].upper()]


def describe(opened: Opened, to: str) -> dict[str, Any]:
    """Print and return what is converted."""
    config = opened.model.config
    parameters = sum(p.numel() for p in opened.model.parameters())
    head = "tied" if config.tied else "of its own"
    print(
        f"{opened.title} -> {to}: {len(config.pattern)} layers, width {config.width}, "
        f"vocabulary {config.vocab:,}, head {head}, {parameters:,} parameters"
    )
    for note in opened.notes:
        print(f"note: {note}")
    tokenizer = opened.tokenizer()
    return {
        "source": opened.title,
        "to": to,
        "layers": len(config.pattern),
        "width": config.width,
        "vocab": config.vocab,
        "tied": config.tied,
        "parameters": parameters,
        "prefix_ids": [] if tokenizer is None else prefix_ids(tokenizer),
        "notes": list(opened.notes),
    }
