"""Turn a model of another library into ours, or ours into theirs, and show that both say the same.

  amor convert SOURCE --out FOLDER                    transformers Mamba2, state-spaces Mamba2, fla Gated DeltaNet, Llama -> ours
  amor convert AUTHORS --out OURS --tokenizer tokenizer.json   a folder of the AMOR authors' released code -> ours
  amor convert OURS --out THEIRS --to authors       ours -> a folder for their code
  amor convert RUN --out HF --to hf                   ours -> a folder for AutoModelForCausalLM
  amor convert models/transformer --out LLAMA --to llama   ours -> another library's own layout, where it has the architecture

SOURCE is a local folder as it is published: config.json, and safetensors or .bin files; a model folder or run of ours too. What
our skeleton cannot do is refused with the reason. The result is read back and compared with the source, run by its own library
(or, where that cannot run on a CPU, by its recurrence written out in float64); if they differ nothing is written and the exit
code is 1. docs/how-to/convert.md tells more.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
from typing import TYPE_CHECKING, Any

from amor.errors import AmorError, nearest

if TYPE_CHECKING:
    from amor.convert.compare import Compared
    from amor.convert.opened import Opened

UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}


class DiffersError(Exception):
    """The result does not say what the source says."""


def arguments(parser: argparse.ArgumentParser) -> None:
    from amor.convert.opened import targets

    parser.add_argument(
        "source", metavar="SOURCE", help="a folder: a published model, a model folder, or a run (its latest model)"
    )
    parser.add_argument("--out", required=True, metavar="FOLDER", help="where the result goes; it must not exist")
    parser.add_argument("--to", default="amor", metavar="LAYOUT", help=f"{', '.join(targets())} (default amor)")
    parser.add_argument("--vocab", type=int, metavar="N", help="keep the first N tokens of the vocabulary: the rest is padding")
    parser.add_argument(
        "--tokenizer", metavar="NAME", help="put this tokenizer beside the model: a tokenizer.json, llama-3.1 or bytes"
    )
    parser.add_argument(
        "--shard-size", metavar="SIZE", help="largest weight file, e.g. 5GB (where the layout has several; default: one file)"
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    from amor.convert.compare import compare
    from amor.convert.opened import open_model, targets
    from amor.convert.write import write
    from amor.data.tokenizer import load as load_tokenizer
    from amor.files import atomic_folder, require_empty

    if args.to not in targets():
        raise AmorError(f"--to {args.to[:80]}: no such layout; {nearest(args.to[:80], targets())}")
    shard = shard_bytes(args.shard_size, args.to)
    require_empty(args.out)
    tokenizer = None if args.tokenizer is None else load_tokenizer(args.tokenizer)
    opened = open_model(args.source, args.vocab, tokenizer)
    describe(opened, args.to)
    found: Compared | None = None
    try:
        with atomic_folder(args.out) as beside:
            for note in write(opened, args.to, beside, shard):
                print(f"note: {note}")
            found = compare(opened, open_model(beside))
            print(found)
            if not found.ok:
                raise DiffersError
    except DiffersError:
        print(f"{args.out} was not written")
    else:
        print(f"written: {args.out}")
    assert found is not None
    return told(opened, args.to) | {"ok": found.ok, "out": str(args.out), "compared": dataclasses.asdict(found)}


def shard_bytes(words: str | None, to: str) -> int | None:
    """ "5GB" -> 5,000,000,000."""
    if words is None:
        return None
    from amor.convert.opened import OURS, layout_of, targets

    sharded = [name for name in targets() if name == "hf" or (name != OURS and layout_of(name).sharded)]
    if to not in sharded:
        raise AmorError(f"--shard-size is for --to {' or '.join(sharded)}; {to} is one file")
    match = re.fullmatch(r"(\d{1,6})(KB|MB|GB)", words, re.IGNORECASE)
    if not match or not int(match[1]):
        raise AmorError(f"--shard-size {words[:80]}: write it like 500MB or 5GB")
    return int(match[1]) * UNITS[match[2].upper()]


def describe(opened: Opened, to: str) -> None:
    facts = told(opened, to)
    head = "tied" if facts["tied"] else "of its own"
    print(
        f"{opened.title} -> {to}: {facts['layers']} layers, width {facts['width']}, vocabulary {facts['vocab']:,}, "
        f"head {head}, {facts['parameters']:,} parameters"
    )
    for note in opened.notes:
        print(f"note: {note}")


def told(opened: Opened, to: str) -> dict[str, Any]:
    config = opened.model.config
    return {
        "source": opened.title,
        "to": to,
        "layers": len(config.pattern),
        "width": config.width,
        "vocab": config.vocab,
        "tied": config.tied,
        "parameters": sum(p.numel() for p in opened.model.parameters()),
        "notes": list(opened.notes),
    }
