"""Evaluate the newest checkpoint of a run: on held-out text (RUN/findings.json), or on its
generated task (RUN/recall.json).
"""

from dataclasses import replace
from pathlib import Path

from amor.data.loader import Batches
from amor.data.shards import splits
from amor.data.tasks.base import read_task
from amor.errors import AmorError
from amor.judge.findings import TOKENS, HeldOutText, find
from amor.judge.recall import recall
from amor.judge.windows import BatchWindows
from amor.models.folder import load, load_model, resolve
from amor.records.findings import Findings
from amor.records.recall import Recall
from amor.run import Run
from amor.train.checkpoint import read_training
from amor.train.recipe import Recipe
from amor.train.resume import recipe_of
from amor.train.step import boundary


def summarise_run(run: Run, data: str | None = None) -> Findings:
    """Findings of the newest checkpoint on held-out text, also written to RUN/findings.json.

    data: the folder of the run's data, if it has moved.
    """
    recipe = recipe_of(run)
    if recipe.task:
        raise AmorError(
            f"{run.folder} learned task {recipe.task['kind']}, not a text; "
            f"amor recall {run.folder} tells how well"
        )
    recipe = replace(recipe, data=data) if data else recipe
    folder = resolve(run.folder)
    model, tokenizer = load(folder)
    if tokenizer is None:
        raise AmorError(f"{folder} holds no tokenizer.json, so its tokens cannot be shown as text")
    findings = find(model, tokenizer, held_out(recipe), read_training(folder).step)
    run.write(run.findings, findings)
    return findings


def evaluate_recall(run: Run) -> Recall:
    """Recall of the newest checkpoint on unseen rows of the run's task, also written to
    RUN/recall.json.
    """
    recalled = recall(load_model(run.folder).eval(), read_task(recipe_of(run).task))
    run.write(run.recall, recalled)
    return recalled


def held_out(recipe: Recipe) -> HeldOutText:
    """The validation split of a run (its training split if it has none), in the windows of its
    evaluations.
    """
    if not Path(recipe.data).is_dir():
        raise AmorError(
            f"the data of this run, {recipe.data}, is gone; the samples and histograms need it, "
            "give --data FOLDER"
        )
    train, valid = splits(recipe.data)
    name, shards = ("train", train) if valid is None else ("valid", valid)
    windows = min(
        recipe.eval.windows, (shards.tokens - 1) // recipe.context, max(TOKENS // recipe.context, 1)
    )
    if not windows:
        raise AmorError(f"{shards.folder} holds fewer tokens than one window of {recipe.context}")
    source = Batches(shards, recipe.context, windows, recipe.seed)
    text = BatchWindows(source, 0, windows, boundary(recipe.documents, shards.end_of_text))
    return HeldOutText(
        name, shards, train, text, rows=max(1, min(recipe.micro_batch, 4096 // recipe.context))
    )
