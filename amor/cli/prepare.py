"""Turn text into shards of tokens that can be trained on.

  amor prepare book.txt notes.jsonl.gz --out data/mine --tokenizer bpe:4096 --valid 0.05
  amor prepare corpus/ --out data/corpus --tokenizer bytes --valid-files held-out.jsonl
  amor prepare hf:HuggingFaceFW/fineweb-edu --config sample-10BT --out data/edu --tokenizer llama-3.1 --valid 0.001

Inputs are .txt, .jsonl (also .gz), .parquet, folders of them, or hf:NAME. Run the same command
again after a stop or a kill: it goes on where it was, and the result is the same to the bit.
`amor train RECIPE --data FOLDER` trains on FOLDER/train and is judged by FOLDER/valid.
"""  # noqa: E501

import argparse
import shlex
import time
from typing import Any

from amor.cli import Parser
from amor.data.prepare import Preparation, Request
from amor.data.shards import Shards
from amor.data.sources import Reading, left_out
from amor.data.stats import unigram_entropy
from amor.errors import AmorError
from amor.presets import SCALES
from amor.vocabulary import NAMES

RECIPE = "tiny/amor-mamba2"


def arguments(parser: Parser) -> None:
    """The options of the verb."""
    add = parser.add_argument
    parser.argument("inputs", "INPUT", "files, folders, or hf:NAME", "+")
    parser.required("--out", "FOLDER", "where the splits and tokenizer.json go")
    parser.required("--tokenizer", "NAME", NAMES)
    words = "hold out this share of the documents, 0 to 1; of a single text file its end"
    parser.number("--valid", 0.0, words)
    words = "hold out these inputs instead"
    add("--valid-files", nargs="+", default=[], metavar="INPUT", help=words)
    parser.text("--field", "NAME", "the field or column that holds the text", "text")
    parser.text("--separator", "WORDS", r"cut .txt files into documents here, e.g. '\n\n'")
    parser.text("--errors", "NAME", "bytes that are not UTF-8: strict or replace", "strict")
    parser.text("--config", "NAME", "the configuration of an hf: dataset")
    parser.text("--split", "NAME", "the split of an hf: dataset", "train")
    parser.text("--end-of-text", "TOKEN", "the token between documents, where its name is unusual")
    parser.number("--shard-tokens", 1 << 26, "tokens per shard")
    parser.number("--workers", None, "processes (default: one per core); no result depends on it")
    parser.flag("--overwrite", "begin again, whatever the folder holds")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Write the splits and describe them."""
    if args.workers is not None and args.workers < 1:
        raise AmorError(f"--workers {args.workers}: give at least 1 process")
    separator = args.separator and args.separator.replace(r"\n", "\n").replace(r"\t", "\t")
    reading = Reading(args.field, args.errors, separator, args.config, args.split)
    request = Request(
        tuple(args.inputs),
        args.tokenizer,
        args.valid,
        tuple(args.valid_files),
        reading,
        args.shard_tokens,
        args.end_of_text,
    )
    began = time.perf_counter()
    preparation = Preparation(request, args.out, args.workers)
    others = left_out([*args.inputs, *args.valid_files])
    if others:
        count, kinds = others.total(), ", ".join(sorted(others))
        print(f"{count:,} file{'s' * (count > 1)} of another kind left out ({kinds})")
    if preparation.cut:
        hint = r"--separator '\n\n' would cut it into documents and hold out some of them"
        print(f"{preparation.cut} is one document: its last {args.valid:.3g} is held out; {hint}")
    splits = preparation.run(args.overwrite)
    seconds = time.perf_counter() - began
    result: dict[str, Any] = {name: describe(name, shards) for name, shards in splits.items()}
    if "valid" in splits:
        entropy = unigram_entropy(splits["train"], splits["valid"])
        result["unigram_entropy"] = entropy
        baseline = f"{entropy:.3f} nats per token on {args.out}/valid (token frequencies alone)"
        print(f"a model must beat {baseline}")
    print(f"{seconds:.1f} s; train with: {advice(args.out, splits['train'].vocab)}")
    return {"folder": str(args.out), "seconds": seconds, **result}


def advice(out: str, vocab: int) -> str:
    """A command that trains on the folder, and is judged by what it holds out."""
    command = f"amor train {RECIPE} --data {shlex.quote(out)}"
    fits = vocab <= SCALES["tiny"]["vocab"]
    return command if fits else f"{command} --set model.changes.vocab={vocab}"


def describe(name: str, shards: Shards) -> dict[str, int]:
    """Print and return the size of a split."""
    m = shards.manifest
    tokens = f"{m.tokens:,} tokens of {m.vocab:,} in {len(m.shards)} shards ({m.dtype})"
    density = f"{m.text_bytes / m.tokens:.2f} bytes per token"
    print(f"{name}: {m.documents:,} documents, {tokens}, {density}")
    counts = {"tokens": m.tokens, "documents": m.documents, "text_bytes": m.text_bytes}
    return counts | {"vocab": m.vocab, "shards": len(m.shards)}
