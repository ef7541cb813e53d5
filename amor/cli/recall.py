"""Test what a trained model remembers: generated tasks whose answers are known, and its gate.

  amor train recall/mqar --set model.name=amor-mamba2 --set model.depth=1
  amor recall runs/mqar
  amor recall runs/mqar --set pairs=16 --rows 512
  amor recall runs/mqar --gate always
  amor recall runs/mqar --fire-rate 0.2 --out recall.json
  amor recall MODEL --task needle --set length=256

Tasks: mqar, stream, selective-copy, induction, phone-book, needle. A run that learned one is tested
on it at its own size, or at another by --set; rows are of a stream that training never uses.
docs/recall.md describes the tasks.
"""

import argparse
from pathlib import Path

from amor import typed
from amor.cli import Parser
from amor.cli._model import chosen_gates, gate_arguments, model_name, name_arguments
from amor.data.tasks.base import Task, read_task
from amor.errors import AmorError
from amor.files import file_to_write, replace_file
from amor.judge.recall import recall
from amor.models.folder import load_model
from amor.progress import Progress
from amor.records.recall import Recall
from amor.run import Run
from amor.study.recall import lines
from amor.train.resume import recipe_of


def arguments(parser: Parser) -> None:
    """The options of the verb."""
    name_arguments(parser, "a run of a task, or any model folder with --task")
    parser.text("--task", "KIND", "which task (default: the one the run learned)")
    parser.repeated("--set", "KEY=VALUE", "change an option of the task, e.g. pairs=16")
    parser.number("--rows", 256, "rows to be judged by")
    parser.number("--seed", 0, "of the rows")
    gate_arguments(parser)
    parser.text("--out", "FILE", "write the result as JSON")


def run(args: argparse.Namespace) -> Recall:
    """Test one model."""
    folder = Path(model_name(args))
    if not folder.is_dir():
        hint = "give a run of a task, written by amor train, e.g. amor train recall/mqar"
        raise AmorError(f"no model folder {str(folder)!r}; {hint}")
    if args.out:
        file_to_write(args.out)
    task, model = chosen_task(args, folder), load_model(folder).eval()
    gates = chosen_gates(args, model)
    with Progress("testing", max(args.rows, 0) * task.length, "tokens") as progress:
        result = recall(model, task, args.rows, args.seed, gates, on_tokens=progress.add)
    print("\n".join(lines(result)))
    if args.out:
        replace_file(Path(args.out), typed.text(result))
        print(f"wrote {args.out}")
    return result


def chosen_task(args: argparse.Namespace, folder: Path) -> Task:
    """The task that is named, or the one of the run, with its options changed."""
    learned = dict(recipe_of(Run(folder)).task) if (folder / "checkpoints").is_dir() else {}
    kind = (args.task or learned.get("kind", "")).replace("-", "_")
    if not kind:
        raise AmorError(f"{folder} learned no task; name one with --task, e.g. --task mqar")
    base = learned if learned.get("kind") == kind else {"kind": kind}
    return read_task({**base, **typed.assignments(args.set, "pairs=16")})
