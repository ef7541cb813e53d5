"""Run a study: train and judge what is missing of it, then show its tables; stop it any time, the same command goes on.

  amor study smoke --data DATA --out STUDY
  amor study smoke --data DATA --out STUDY --plan
  amor study smoke --data DATA --out STUDY --only mamba2 --jobs 1
  amor study my-study.toml --data DATA --steps 200 --format markdown

A study is a TOML file, or one of the package by name: smoke, paper-mini, gates, choices, frontier, frontier-long, recall,
recall-transformer, recall-gates, recall-size.
STUDY gets one run directory per run, what was judged of each, tables as text, Markdown and LaTeX,
figures, and index.html with all of them.
docs/study.md tells how to write one.
Exit codes: 0 everything is there; 1 a run failed, and is named; 2 something to mend, said in one line; 130 stopped by Ctrl-C.
"""

import argparse
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from amor import typed
from amor.errors import AmorError
from amor.study.table import FORMATS

if TYPE_CHECKING:
    from amor.experiment.runner import Runner


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("study", metavar="STUDY", help="a TOML file, or a study of the package by name, such as smoke")
    add("--data", metavar="FOLDER", help="prepared data: train/ and valid/; a study of generated tasks needs none")
    add("--out", metavar="FOLDER", help="where everything is kept (default: studies/<name of the study>)")
    add("--plan", action="store_true", help="say what is done, what is left and how long it will take; run nothing")
    add("--jobs", type=int, metavar="N", help="runs at a time (default: cores // threads of the study); no result depends on it")
    add("--only", metavar="NAMES", action="append", default=[], help="only these rows or runs, with ; between them")
    add("--set", metavar="KEY=VALUE", action="append", default=[], help="change a key of every recipe; may be repeated")
    add("--steps", type=int, metavar="N", help="train every run this many steps; the schedule is as long")
    add("--seeds", metavar="N,N", help="instead of the study's own")
    add("--format", choices=FORMATS, default="text", help="of the tables that are printed; all three are written")


def run(args: argparse.Namespace) -> dict[str, Any]:
    from amor.experiment.plan import begin, check_folder
    from amor.study import result_page, results

    runner = prepared(args)
    check_folder(runner.plan)
    if args.plan:
        return planned(runner)
    begin(runner.plan)
    failed = runner.go()
    study_results = results.read(runner.plan.folder)
    files = result_page.write(study_results)
    return shown(study_results, args.format, files, failed)


def prepared(args: argparse.Namespace) -> "Runner":
    """The study that is asked for, with everything about it known to be sound."""
    from amor.bench.machine import gemm_rate
    from amor.experiment import plan as plans
    from amor.experiment.runner import Runner, RunnerOptions, cores
    from amor.experiment.status import Estimator

    path = plans.find(args.study)
    study = plans.read(path, args.set, args.steps, seeds(args.seeds))
    at_once = max(1, cores() // study.threads) if args.jobs is None else args.jobs
    if at_once < 1:
        raise AmorError(f"--jobs {args.jobs}: at least one run at a time")
    plan = plans.plan(study, path.stem, args.data, args.out or f"studies/{path.stem}")
    only = tuple(name.strip() for names in args.only for name in names.split(";"))
    return Runner(plan, RunnerOptions(at_once, only), Estimator(plan, lambda: gemm_rate() * 1e9))


def seeds(words: str | None) -> tuple[int, ...] | None:
    if words is None:
        return None
    if not re.fullmatch(r"-?\d+(,-?\d+)*", words):
        raise AmorError(f"--seeds {words}: write whole numbers with commas, e.g. --seeds 1,2,3")
    return tuple(int(word) for word in words.split(","))


def planned(runner: "Runner") -> dict[str, Any]:
    """What is done, what is left, and how long it will take."""
    from amor.train.predict import spoken

    runs = runner.status()
    width = max(len(one.planned.folder) for one in runs)
    for one in runs:
        todo = f"to judge: {', '.join(one.unjudged)}" if one.unjudged else "done"
        print(f"{one.planned.folder:<{width}}  step {one.step:,}/{one.planned.steps:,}  {todo if one.trained else ''}".rstrip())
    left = runner.clock.left(runs, runner.options.at_once)
    trained, judged = sum(one.trained for one in runs), sum(one.trained and not one.unjudged for one in runs)
    judging = "judging not known yet" if left.judge is None else f"judging {spoken(left.judge)}"
    print(f"{trained} of {len(runs)} runs are trained, {judged} are judged; {runner.options.at_once} at a time")
    print(f"to go: training {spoken(left.train)} ({runner.clock.source}), {judging}")
    counts = {"runs": len(runs), "trained": trained, "judged": judged, "jobs": runner.options.at_once}
    return counts | {"train_seconds": left.train, "judge_seconds": left.judge, "out": str(runner.plan.folder)}


def shown(results: Any, form: str, files: list[Path], failed: dict[str, str]) -> dict[str, Any]:
    from amor.study.table import printed
    from amor.study.tables import make_tables

    tables = make_tables(results)
    for table in tables:
        print(printed(table, form, sys.stdout.isatty()), end="\n\n")
    for name, line in failed.items():
        print(f"failed: {name}: {line}")
    print(f"{files[-1]} written; open it in a browser")
    return {"ok": not failed, "tables": typed.tree(tables), "files": [str(file) for file in files], "failed": failed}
