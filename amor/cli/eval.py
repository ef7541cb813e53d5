"""A trained model through the paper's suites: scores with standard errors, and what its gates did for them.

  amor eval MODEL --suite common-sense --data SETS
  amor eval MODEL --suite niah,length-extrapolation --data SETS --out evals/mine
  amor eval MODEL --suite common-sense --data SETS --gates model,closed,open --limit 200
  amor eval MODEL --suite common-sense --data SETS --untrained --out evals/floor
  torchrun --nproc-per-node 2 -m amor eval MODEL --suite retrieval --data SETS

Suites: common-sense, retrieval, niah, longbench, length-extrapolation, perplexity. Most run through lm-evaluation-harness
(pip install 'amor[eval]'), on files of a local folder, or on the hub's data sets where no folder is named. What is missing is
skipped by name. Stop it any time: the same command goes on, and computes nothing twice. `amor table` shows what was found,
docs/evaluation.md tells what is asked and how.
"""

import argparse
import re
from pathlib import Path
from typing import Any, TypeVar, get_args

from amor.cli._model import opened
from amor.errors import AmorError, nearest
from amor.files import folder_to_write
from amor.records.evals import Gates
from amor.records.evals import Path as Way

T = TypeVar("T", bound=str)

GATES, PATHS = get_args(Gates), get_args(Way)


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("name", nargs="?", metavar="MODEL", help="a model folder, or a run (its latest model)")
    add("--model", metavar="MODEL", help="the same, as an option")
    add("--tokenizer", help="for a model folder without one: bytes, llama-3.1, or a tokenizer.json")
    add("--suite", default="common-sense", metavar="NAMES", help="suites, with commas (default common-sense)")
    add("--task", metavar="NAMES", help="of the suites these tasks only, with commas")
    add("--data", metavar="FOLDER", help="where the sets lie as files; without it they come from the hub")
    add("--out", metavar="FOLDER", help="where answers and results go (default: evals/<name of the model>)")
    add("--gates", default="model", metavar="WAYS", help="model (default), closed, open, with commas: each is scored")
    add("--path", default="likelihood", help="likelihood (default): by the forward; decode: token by token, skipping for real")
    add("--limit", type=int, metavar="N", help="the first N documents of each task, to try things; no score of the whole set")
    add("--max-length", type=int, metavar="N", help="tokens a request may have; longer ones are cut on the left (default: none)")
    add("--bos", action="store_true", help="put the tokenizer's first token before each context")
    add("--lengths", metavar="N,N", help="of niah or length-extrapolation, in tokens (default: the paper's)")
    add("--samples", type=int, default=500, metavar="N", help="niah: prompts a length (default 500)")
    add("--segments", type=int, default=50, metavar="N", help="length-extrapolation: texts a set (default 50)")
    add("--text", metavar="TEXT", help="perplexity: a folder of amor prepare, a .txt or .jsonl file that is held out")
    add("--context", type=int, default=0, metavar="N", help="perplexity: tokens a window (default: as it was trained)")
    add("--seed", type=int, default=0, help="of what is drawn: niah's prompts, an untrained model (default 0)")
    add("--rows", type=int, default=32, metavar="N", help="contexts read at a time (default 32); no score depends on it")
    add("--untrained", action="store_true", help="the same model with fresh weights: the floor of a table")


def run(args: argparse.Namespace) -> dict[str, Any]:
    from amor.eval import suites
    from amor.eval.subject import EvalSubject, Ranks, describe_model
    from amor.eval.tasks import SUITES

    names = chosen("--suite", args.suite, tuple(SUITES))
    ways = chosen("--gates", args.gates, GATES)
    (path,) = chosen("--path", args.path.replace(",", " "), PATHS)
    for flag in ("limit", "max_length", "samples", "segments", "rows"):
        value = getattr(args, flag)
        if value is not None and value < 1:
            raise AmorError(f"--{flag.replace('_', '-')} {value}: at least 1 is needed")
    lengths = None if args.lengths is None else [_length(word) for word in args.lengths.split(",")]
    if args.data is not None and not Path(args.data).is_dir():
        raise AmorError(f"--data {args.data}: no such folder")
    model, tokenizer = opened(args)
    if tokenizer is None:
        raise AmorError("the model folder holds no tokenizer.json; name one with --tokenizer")
    if ways != ["model"] and not model.each_block():
        raise AmorError(f"--gates {args.gates}: {model.config.name} has no gates; leave it out")
    if args.untrained:
        model = suites.untrained(model, args.seed)
    about = describe_model(model, args.name or args.model, args.untrained)
    out = Path(args.out or f"evals/{re.sub(r'[^A-Za-z0-9._-]+', '-', about.name)}")
    folder_to_write(out)
    request = suites.EvalRequest(
        data=None if args.data is None else Path(args.data),
        text=None if args.text is None else Path(args.text),
        context=args.context,
        tasks=None if args.task is None else [word.strip() for word in args.task.split(",")],
        lengths=lengths,
        samples=args.samples,
        segments=args.segments,
        seed=args.seed,
        path=path,
        max_length=args.max_length,
        bos=args.bos,
        limit=args.limit,
    )
    with Ranks.here() as ranks:
        args.json = args.json and not ranks.rank  # of many ranks one speaks
        return suites.evaluate(EvalSubject(model, tokenizer, about, out, args.rows, ranks), names, ways, request)


def chosen(flag: str, words: str, choices: tuple[T, ...]) -> list[T]:
    named = {str(choice): choice for choice in choices}
    found = list(dict.fromkeys(word.strip() for word in words.split(",")))
    for word in found:
        if word not in named:
            raise AmorError(f"{flag}: no {word[:80]!r}; {nearest(word[:80], choices)}")
    return [named[word] for word in found]


def _length(word: str) -> int:
    if not word.strip().isdigit() or not 16 <= int(word) <= 1 << 20:
        raise AmorError(f"--lengths: {word[:40]!r} is no length; give tokens, e.g. 1024,2048")
    return int(word)
