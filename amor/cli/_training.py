"""Shared by verbs that train: the observers of a run, its machine, and the report at its end."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from amor import typed
from amor.bench.machine import describe, gemm_rate
from amor.records.run import Machine
from amor.run import Run
from amor.study.recall import lines
from amor.train import loop
from amor.train.display import flops_per_token, for_people
from amor.train.recipe import Recipe
from amor.train.trackers import trackers
from amor.train.watch import Observer, RunEnded


class Reporter(Observer):
    """Evaluates the model at the end of a run and writes RUN/report.html; not for a stopped run."""

    def on_end(self, ended: RunEnded) -> None:
        """Write the report of a finished run."""
        if ended.done:
            print(f"report: {make_report(Run(ended.folder))['report']}")


def train_observed(
    recipe: Recipe, out: str | Path, resume: str = "auto", report: bool = True
) -> RunEnded:
    """Train with a display, the recipe's trackers and, with `report`, a report at the end; terminal
    and trackers are closed however the run ends."""
    machine = measured_machine(recipe)
    ceiling = machine.gemm_gflops
    with ExitStack() as stack:
        observers = [for_people(ceiling * 1e9 if ceiling else None), *trackers(recipe.track)]
        for observer in observers:
            stack.callback(observer.close)
        return loop.train(recipe, out, observers + [Reporter()] * report, resume, machine)


def run_result(ended: RunEnded) -> dict[str, Any]:
    """The JSON result of a verb that trained a run."""
    from amor.study import report

    reported = {"report": str(Run(ended.folder).folder / report.FILE)} if ended.done else {}
    return {"ok": True, **typed.tree(ended), **reported}


def make_report(run: Run, data: str | None = None) -> dict[str, Any]:
    """Evaluate the newest checkpoint (on text, or on the run's task) and write the report; the JSON
    result."""
    from amor.study import report
    from amor.train.look import evaluate_recall, summarise_run
    from amor.train.resume import recipe_of

    if recipe_of(run).task and not data:
        recalled = evaluate_recall(run)
        print("\n".join(lines(recalled)))
        return {"report": str(report.write(run)), "recall": typed.tree(recalled)}
    findings = summarise_run(run, data)
    print("\n".join(report.sentences(run)))
    scores = {"judged": typed.tree(findings.judged), "unigram": typed.tree(findings.unigram)}
    return {"report": str(report.write(run)), "step": findings.step, **scores}


def measured_machine(recipe: Recipe) -> Machine:
    """The machine, with its matrix-product rate if one process trains on the CPU: other cases are
    not measured."""
    machine = describe()
    on_cpu = recipe.device == "cpu" or (recipe.device == "auto" and not machine.gpus)
    if recipe.distributed != "none" or not on_cpu:
        return machine
    rate, flops = round(gemm_rate(), 1), flops_per_token(recipe)
    return replace(machine, gemm_gflops=rate, flops_per_token=flops)
