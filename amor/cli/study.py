"""Run a study: train and judge what is missing of it, then show its tables; stop it any time.

  amor study smoke --data DATA --out STUDY
  amor study smoke --data DATA --out STUDY --plan
  amor study smoke --data DATA --out STUDY --only mamba2 --jobs 1
  amor study my-study.toml --data DATA --steps 200 --format markdown

The same command goes on with a study that was stopped. STUDY gets one run directory per run, the
measurements of each, tables as text, Markdown and LaTeX, figures, and index.html with all of them.
docs/study.md explains how to write one.
Exit codes: 0 everything is there; 1 a run failed, and is named; 2 something to mend, in one line;
130 stopped by Ctrl-C.
"""

import argparse
import re
import sys
from pathlib import Path
from typing import Any

from amor.bench import machine
from amor.cli import Parser
from amor.errors import AmorError
from amor.experiment import plan as plans
from amor.experiment.runner import Runner, RunnerOptions, cores
from amor.experiment.status import Estimator
from amor.study import result_page, results
from amor.study.table import FORMATS, printed
from amor.study.tables import make_tables
from amor.train.predict import spoken


def arguments(parser: Parser) -> None:
    """The options of the verb."""
    parser.argument("study", "STUDY", f"a TOML file, or one of: {', '.join(plans.names())}")
    parser.text("--data", "FOLDER", "prepared data: train/ and valid/; not for generated tasks")
    parser.text("--out", "FOLDER", "where results go (default: studies/<name of the study>)")
    parser.flag("--plan", "print what is done, what is left and how long it will take; run nothing")
    parser.number("--jobs", None, "runs at a time (default: cores // threads of the study)")
    parser.repeated("--only", "NAMES", "only these rows or runs, with ; between them")
    parser.repeated("--set", "KEY=VALUE", "change a key of every recipe")
    parser.number("--steps", None, "train every run this many steps; the schedule is as long")
    parser.text("--seeds", "N,N", "instead of the study's own")
    parser.choice("--format", FORMATS, "text", "of the printed tables; all three are written")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Run what is missing and show the tables, or print the plan."""
    runner = make_runner(args)
    plans.check_folder(runner.plan)
    if args.plan:
        return show_plan(runner)
    plans.begin(runner.plan)
    failed = runner.go()
    study_results = results.read(runner.plan.folder)
    files = result_page.write(study_results)
    return show(study_results, args.format, files, failed)


def make_runner(args: argparse.Namespace) -> Runner:
    """The runner of the study, with everything about it checked."""
    path = plans.find(args.study)
    study = plans.read(path, args.set, args.steps, seeds(args.seeds))
    at_once = max(1, cores() // study.threads) if args.jobs is None else args.jobs
    if at_once < 1:
        raise AmorError(f"--jobs {args.jobs}: at least one run at a time")
    plan = plans.plan(study, path.stem, args.data, args.out or f"studies/{path.stem}")
    only = tuple(name.strip() for names in args.only for name in names.split(";"))
    estimator = Estimator(plan, lambda: machine.gemm_rate() * 1e9)
    return Runner(plan, RunnerOptions(at_once, only), estimator)


def seeds(words: str | None) -> tuple[int, ...] | None:
    """Whole numbers written with commas."""
    if words is None:
        return None
    if not re.fullmatch(r"-?\d+(,-?\d+)*", words):
        raise AmorError(f"--seeds {words}: write whole numbers with commas, e.g. --seeds 1,2,3")
    return tuple(int(word) for word in words.split(","))


def show_plan(runner: Runner) -> dict[str, Any]:
    """What is done, what is left, and how long it will take."""
    runs, jobs = runner.status(), runner.options.at_once
    width = max(len(one.planned.folder) for one in runs)
    for one in runs:
        left_to_judge = f"to judge: {', '.join(one.unjudged)}" if one.unjudged else "done"
        steps = f"step {one.step:,}/{one.planned.steps:,}"
        state = left_to_judge if one.trained else ""
        print(f"{one.planned.folder:<{width}}  {steps}  {state}".rstrip())
    left = runner.clock.left(runs, jobs)
    trained = sum(one.trained for one in runs)
    judged = sum(one.trained and not one.unjudged for one in runs)
    print(f"{trained} of {len(runs)} runs are trained, {judged} are judged; {jobs} at a time")
    judging = "not known yet" if left.judge is None else spoken(left.judge)
    training = f"{spoken(left.train)} ({runner.clock.source})"
    print(f"to go: training {training}, judging {judging}")
    counts = {"runs": len(runs), "trained": trained, "judged": judged, "jobs": jobs}
    seconds = {"train_seconds": left.train, "judge_seconds": left.judge}
    return counts | seconds | {"out": str(runner.plan.folder)}


def show(results: Any, form: str, files: list[Path], failed: dict[str, str]) -> dict[str, Any]:
    """Print the tables, and the runs that failed."""
    tables = make_tables(results)
    for table in tables:
        print(printed(table, form, sys.stdout.isatty()), end="\n\n")
    for name, line in failed.items():
        print(f"failed: {name}: {line}")
    print(f"{files[-1]} written; open it in a browser")
    names = [str(file) for file in files]
    return {"ok": not failed, "tables": tables, "files": names, "failed": failed}
