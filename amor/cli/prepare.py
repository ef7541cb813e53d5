"""Turn text into shards of tokens that can be trained on.

  amor prepare book.txt notes.jsonl.gz --out data/mine --tokenizer bpe:4096 --valid 0.05
  amor prepare corpus/ --out data/corpus --tokenizer bytes --valid-files held-out.jsonl
  amor prepare hf:HuggingFaceFW/fineweb-edu --config sample-10BT --out data/edu --tokenizer llama-3.1 --valid 0.001

Inputs are .txt, .jsonl (also .gz), .parquet, folders of them, or hf:NAME. Run the same command again after a stop or a kill:
it goes on where it was, and the result is the same to the bit. `amor train RECIPE --data FOLDER` trains on FOLDER/train and
is judged by FOLDER/valid.
"""

import argparse
import shlex
import time
from typing import Any

from amor.data.prepare import Preparation, Request
from amor.data.shards import Shards
from amor.data.sources import Reading
from amor.data.stats import unigram_entropy
from amor.errors import AmorError
from amor.presets import SCALES
from amor.vocabulary import NAMES

RECIPE = "tiny/amor-mamba2"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("inputs", nargs="+", metavar="INPUT", help="files, folders, or hf:NAME")
    parser.add_argument("--out", required=True, metavar="FOLDER", help="where the splits and tokenizer.json go")
    parser.add_argument("--tokenizer", required=True, metavar="NAME", help=NAMES)
    parser.add_argument(
        "--valid", type=float, default=0.0, metavar="SHARE", help="hold out this share of the documents, 0 to 1 (default 0: none)"
    )
    parser.add_argument("--valid-files", nargs="+", default=[], metavar="INPUT", help="hold out these inputs instead")
    parser.add_argument("--field", default="text", help="the field or column that holds the text (default: text)")
    parser.add_argument(
        "--separator", metavar="WORDS", help=r"cut .txt files into documents here, e.g. '\n\n' (default: a file is one)"
    )
    parser.add_argument(
        "--errors", default="strict", help="what to do with bytes that are not UTF-8: strict (default) or replace"
    )
    parser.add_argument("--config", help="the configuration of an hf: dataset")
    parser.add_argument("--split", default="train", help="the split of an hf: dataset (default: train)")
    parser.add_argument("--end-of-text", metavar="TOKEN", help="the token between documents, where its name is unusual")
    parser.add_argument("--shard-tokens", type=int, default=1 << 26, metavar="N", help="tokens a shard (default: 67,108,864)")
    parser.add_argument(
        "--workers", type=int, metavar="N", help="processes (default: one a core); the result does not depend on it"
    )
    parser.add_argument("--overwrite", action="store_true", help="begin again, whatever the folder holds")


def run(args: argparse.Namespace) -> dict[str, Any]:
    if args.workers is not None and args.workers < 1:
        raise AmorError(f"--workers {args.workers}: give at least 1 process")
    separator = None if args.separator is None else args.separator.replace(r"\n", "\n").replace(r"\t", "\t")
    reading = Reading(args.field, args.errors, separator, args.config, args.split)
    request = Request(
        tuple(args.inputs), args.tokenizer, args.valid, tuple(args.valid_files), reading, args.shard_tokens, args.end_of_text
    )
    began = time.perf_counter()
    splits = Preparation(request, args.out, args.workers).run(args.overwrite)
    seconds = time.perf_counter() - began
    found: dict[str, Any] = {name: _said(name, shards) for name, shards in splits.items()}
    if "valid" in splits:
        found["unigram_entropy"] = unigram_entropy(splits["train"], splits["valid"])
        print(f"a model must beat {found['unigram_entropy']:.3f} nats a token on {args.out}/valid (token frequencies alone)")
    print(f"{seconds:.1f} s; train with: {advice(args.out, splits['train'].vocab)}")
    return {"folder": str(args.out), "seconds": seconds, **found}


def advice(out: str, vocab: int) -> str:
    """A command that trains on the folder, and is judged by what it holds out."""
    command = f"amor train {RECIPE} --data {shlex.quote(out)}"
    return command if vocab <= SCALES["tiny"]["vocab"] else f"{command} --set model.changes.vocab={vocab}"


def _said(name: str, shards: Shards) -> dict[str, Any]:
    m = shards.manifest
    words = (
        f"{m.tokens:,} tokens of {m.vocab:,} in {len(m.shards)} shards ({m.dtype}), {m.text_bytes / m.tokens:.2f} bytes a token"
    )
    print(f"{name}: {m.documents:,} documents, {words}")
    return {"tokens": m.tokens, "documents": m.documents, "text_bytes": m.text_bytes, "vocab": m.vocab, "shards": len(m.shards)}
