"""What every verb that trains shares: who watches the run, what the machine is, and the report at its end."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from msgspec.structs import replace

from amor import typed
from amor.bench.machine import describe, gemm_rate
from amor.records.run import Machine
from amor.run import Run
from amor.study.recall import lines
from amor.train.display import flops_per_token, for_people
from amor.train.recipe import Recipe
from amor.train.trackers import trackers
from amor.train.watch import Observer, RunEnded


class Reporter(Observer):
    """At the end of a run looks at the model and writes RUN/report.html; a stopped run gets none."""

    def on_end(self, ended: RunEnded) -> None:
        if ended.done:
            print(f"report: {make_report(Run(ended.folder))['report']}")


def as_result(ended: RunEnded) -> dict[str, Any]:
    """The end of a run that was seen, as a verb tells it."""
    from amor.study import report

    found = {"ok": True, **typed.tree(ended)}
    return found | {"report": str(Run(ended.folder).folder / report.FILE)} if ended.done else found


def make_report(run: Run, data: str | None = None) -> dict[str, Any]:
    """Findings of the newest checkpoint, or what it recalls of its task, and the page drawn from them."""
    from amor.study import report
    from amor.train.look import evaluate_recall, summarise_run
    from amor.train.resume import recipe_of

    if recipe_of(run).task and not data:
        recalled = evaluate_recall(run)
        print("\n".join(lines(recalled)))
        return {"report": str(report.write(run)), "recall": typed.tree(recalled)}
    found = summarise_run(run, data)
    told = {"step": found.step, "judged": typed.tree(found.judged), "unigram": typed.tree(found.unigram)}
    return {"report": str(report.write(run)), **told}


@contextmanager
def observing(recipe: Recipe) -> Iterator[tuple[list[Observer], Machine]]:
    """Observers for a run of this recipe, and its machine; the terminal and the trackers are given back however it ends."""
    machine = measured(recipe)
    ceiling = machine.gemm_gflops
    with ExitStack() as stack:
        shown = for_people(ceiling * 1e9 if ceiling else None)
        stack.callback(shown.close)
        tracking = trackers(recipe.track)
        for tracker in tracking:
            stack.callback(tracker.close)
        yield [shown, *tracking, Reporter()], machine


def measured(recipe: Recipe) -> Machine:
    """The machine, with its ceiling where one process trains on the CPU: the only one that is measured."""
    machine = describe()
    if recipe.distributed == "none" and (recipe.device == "cpu" or (recipe.device == "auto" and not machine.gpus)):
        return replace(machine, gemm_gflops=round(gemm_rate(), 1), flops_per_token=flops_per_token(recipe))
    return machine
