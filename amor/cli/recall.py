"""Ask a trained model what it remembers: generated tasks whose answers are known, with its gate at the questions and elsewhere.

  amor train recall/mqar --set model.name=amor-mamba2 --set model.depth=1
  amor recall runs/mqar
  amor recall runs/mqar --set pairs=16 --rows 512
  amor recall runs/mqar --gate always
  amor recall runs/mqar --fire-rate 0.2 --out recall.json
  amor recall MODEL --task needle --set length=256

Tasks: mqar, stream, selective-copy, induction, phone-book, needle. A run that learned one is asked the same at its own size, or
at another by --set; rows are of a stream that no training sees. docs/recall.md tells what is asked.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from amor import typed
from amor.cli._model import named
from amor.errors import AmorError
from amor.files import file_to_write, replace_file

if TYPE_CHECKING:
    from amor.data.tasks.base import Task


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("name", nargs="?", metavar="MODEL", help="a run of a task, or any model folder with --task")
    add("--model", metavar="MODEL", help="the same, as an option")
    add("--task", metavar="KIND", help="which task (default: the one the run learned)")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="change an option of the task, e.g. pairs=16")
    add("--rows", type=int, default=256, metavar="N", help="rows to be judged by (default 256)")
    add("--seed", type=int, default=0, help="of the rows (default 0)")
    add("--gate", metavar="KIND", help="another gate for the while: always, never or random:SHARE, e.g. random:0.3")
    add("--fire-rate", type=float, metavar="SHARE", help="set the gate to fire on this share of tokens, 0 to 1")
    add("--out", metavar="FILE", help="write what was found as JSON")


def run(args: argparse.Namespace) -> dict[str, Any]:
    from amor.progress import Progress
    from amor.gates.override import override_gates
    from amor.judge.gates import own_gates
    from amor.judge.recall import recall
    from amor.models.folder import load_model
    from amor.study.recall import lines

    folder = Path(named(args))
    if not folder.is_dir():
        raise AmorError(
            f"no model folder {str(folder)!r}; give a run of a task, written by amor train, e.g. amor train recall/mqar"
        )
    if args.out:
        file_to_write(args.out)
    task, model = asked(args, folder), load_model(folder).eval()
    gates = override_gates(own_gates(model), args.gate, args.fire_rate)
    with Progress("asking", max(args.rows, 0) * task.length, "tokens") as progress:
        found = recall(model, task, args.rows, args.seed, gates, on_tokens=progress.add)
    print("\n".join(lines(found)))
    if args.out:
        replace_file(Path(args.out), typed.text(found))
        print(f"wrote {args.out}")
    return dict(typed.tree(found))


def asked(args: argparse.Namespace, folder: Path) -> "Task":
    """The task that is named, or the one a run learned, with its options changed."""
    from amor.data.tasks.base import read_task
    from amor.run import Run
    from amor.train.resume import recipe_of

    learned = dict(recipe_of(Run(folder)).task) if (folder / "checkpoints").is_dir() else {}
    kind = (args.task or learned.get("kind", "")).replace("-", "_")
    if not kind:
        raise AmorError(f"{folder} learned no task; name one with --task, e.g. --task mqar")
    base = learned if learned.get("kind") == kind else {"kind": kind}
    return read_task({**base, **typed.assignments(args.set, "pairs=16")})
