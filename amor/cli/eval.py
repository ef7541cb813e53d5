"""A trained model through the paper's suites: scores with standard errors, and counts of its gates.

  amor eval MODEL --suite common-sense --data SETS
  amor eval MODEL --suite niah,length-extrapolation --data SETS --out evals/mine
  amor eval MODEL --suite common-sense --data SETS --gates model,closed,open --limit 200
  amor eval MODEL --suite common-sense --data SETS --untrained --out evals/floor
  torchrun --nproc-per-node 2 -m amor eval MODEL --suite retrieval --data SETS

Suites: common-sense, retrieval, niah, longbench, length-extrapolation, perplexity. Most run through
lm-evaluation-harness (the extra `eval`), on files of a local folder, or on the hub's data
sets where no folder is named. What is missing is skipped by name. Stop it any time: the same
command goes on, and computes nothing twice. `amor table` shows the results, docs/evaluation.md
describes the tasks.
"""

import argparse
import re
from pathlib import Path
from typing import Any, TypeVar, get_args

from amor.cli import Parser
from amor.cli._model import bos_arguments, open_trained, require_tokenizer, trained_arguments
from amor.errors import AmorError, nearest
from amor.eval import suites
from amor.eval.subject import EvalSubject, Ranks, describe_model
from amor.eval.tasks import SUITES
from amor.files import folder_to_write
from amor.models.build import build
from amor.records import evals
from amor.study.table import Cell, Table, TableRow, as_text

T = TypeVar("T", bound=str)


def arguments(parser: Parser) -> None:
    """The options of the verb."""
    trained_arguments(parser)
    parser.text("--suite", "NAMES", "suites, with commas", "common-sense")
    parser.text("--task", "NAMES", "only these tasks of the suites, with commas")
    parser.text("--data", "FOLDER", "data sets as files; without it they come from the hub")
    parser.text("--out", "FOLDER", "where results go (default: evals/<name of the model>)")
    parser.text("--gates", "NAMES", "model, closed, open, with commas: each is scored", "model")
    parser.text("--path", "NAME", "likelihood, or decode: token by token", "likelihood")
    parser.number("--limit", None, "only the first N documents of each task, to try things")
    parser.number("--max-length", None, "tokens per request; longer ones are cut on the left")
    bos_arguments(parser)
    parser.text("--lengths", "N,N", "tokens, of niah and length-extrapolation")
    parser.number("--samples", 500, "niah: prompts per length")
    parser.number("--segments", 50, "length-extrapolation: texts per set")
    parser.text("--text", "TEXT", "perplexity: a folder of amor prepare or a text file")
    parser.number("--context", 0, "perplexity: tokens per window; 0: as in training")
    parser.number("--seed", 0, "of what is random: niah's prompts, an untrained model")
    parser.number("--rows", 32, "contexts read at a time; no score depends on it")
    parser.flag("--untrained", "the same model with fresh weights: the floor of a table")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Evaluate every suite with every setting of the gates."""
    names = chosen("--suite", args.suite, tuple(SUITES))
    gates = chosen("--gates", args.gates, get_args(evals.Gates))
    (path,) = chosen("--path", args.path.replace(",", " "), get_args(evals.Path))
    for flag in ("limit", "max_length", "samples", "segments", "rows"):
        value = getattr(args, flag)
        if value is not None and value < 1:
            raise AmorError(f"--{flag.replace('_', '-')} {value}: at least 1 is needed")
    request = suites.EvalRequest(
        data=None if args.data is None else Path(args.data),
        text=None if args.text is None else Path(args.text),
        context=args.context,
        tasks=None if args.task is None else [word.strip() for word in args.task.split(",")],
        lengths=None if args.lengths is None else [length(w) for w in args.lengths.split(",")],
        samples=args.samples,
        segments=args.segments,
        seed=args.seed,
        path=path,
        max_length=args.max_length,
        add_bos=args.bos,
        limit=args.limit,
    )
    model, own_tokenizer = open_trained(args)
    tokenizer = require_tokenizer(own_tokenizer)
    if gates != ["model"] and not model.each_block():
        raise AmorError(f"--gates {args.gates}: {model.config.name} has no gates; leave it out")
    if args.untrained:
        model = build(model.config, args.seed).eval()
    about = describe_model(model, args.name or args.model, args.untrained)
    out = Path(args.out or f"evals/{re.sub(r'[^A-Za-z0-9._-]+', '-', about.name)}")
    folder_to_write(out)
    with Ranks.here() as ranks:
        args.json = args.json and not ranks.rank  # only rank 0 prints
        subject = EvalSubject(model, tokenizer, about, out, args.rows, ranks)
        result = suites.evaluate(subject, names, gates, request)
        if not ranks.rank:
            show(about.name, result)
        return result


def show(model: str, result: dict[str, Any]) -> None:
    """Print a table of scores per suite, and the command that sets them beside others."""
    for suite, by_gates in result["scores"].items():
        ways = list(by_gates)
        lines = []
        for task, numbers in by_gates[ways[0]].items():
            for metric in (name for name in numbers if not name.endswith("_stderr")):
                each = [by_gates[way].get(task, {}) for way in ways]
                errors = (scores.get(f"{metric}_stderr") for scores in each)
                cells = (
                    Cell(s[metric], e, 4) if metric in s else None for s, e in zip(each, errors)
                )
                lines.append(TableRow(task, (metric, *cells)))
        heads = ways if len(ways) > 1 else ["score"]
        print(as_text(Table(f"{suite}, {model}", "task", ("metric", *heads), tuple(lines))))
        print()
    print(f"in the columns of the paper, beside other models: amor table {result['folder']}")


def chosen(flag: str, words: str, choices: tuple[T, ...]) -> list[T]:
    """The choices that an option names with commas, each once."""
    names = list(dict.fromkeys(word.strip() for word in words.split(",")))
    for name in names:
        if name not in choices:
            raise AmorError(f"{flag}: no {name[:80]!r}; {nearest(name[:80], choices)}")
    return [choice for name in names for choice in choices if choice == name]


def length(word: str) -> int:
    """One of --lengths."""
    if not word.strip().isdigit() or not 16 <= int(word) <= 1 << 20:
        raise AmorError(f"--lengths: {word[:40]!r} is no length; give tokens, e.g. 1024,2048")
    return int(word)
