"""A look at a run: what the model of its newest checkpoint shows on held-out text, written to RUN/findings.json.

Of a run that learned a generated task: what it recalls, written to RUN/recall.json.
"""

from dataclasses import replace
from pathlib import Path

from amor.data.loader import Batches
from amor.data.shards import splits
from amor.data.tasks.base import read_task
from amor.errors import AmorError
from amor.judge.findings import TOKENS, Held, find
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
    """What was found, which is also written into the run. data: where the run's data is now."""
    recipe = recipe_of(run)
    if recipe.task:
        raise AmorError(f"{run.folder} learned task {recipe.task['kind']}, not a text; amor recall {run.folder} tells how well")
    recipe = replace(recipe, data=data) if data else recipe
    folder = resolve(run.folder)
    model, tokenizer = load(folder)
    if tokenizer is None:
        raise AmorError(f"{folder} holds no tokenizer.json, so its tokens cannot be shown as text")
    found = find(model, tokenizer, held_out(recipe), read_training(folder).step)
    run.write(run.findings, found)
    return found


def evaluate_recall(run: Run) -> Recall:
    """What the newest model of a task's run recalls of rows that it never met, which is also written into the run."""
    found = recall(load_model(run.folder).eval(), read_task(recipe_of(run).task))
    run.write(run.recall, found)
    return found


def held_out(recipe: Recipe) -> Held:
    """The validation split of a run, or its training split where it has none, cut as evaluation cuts it."""
    if not Path(recipe.data).is_dir():
        raise AmorError(f"the data of this run, {recipe.data}, is gone; the samples and histograms need it, give --data FOLDER")
    train, valid = splits(recipe.data)
    name, shards = ("train", train) if valid is None else ("valid", valid)
    windows = min(recipe.eval.windows, (shards.tokens - 1) // recipe.context, max(TOKENS // recipe.context, 1))
    if not windows:
        raise AmorError(f"{shards.folder} holds fewer tokens than one window of {recipe.context}")
    source = Batches(shards, recipe.context, windows, recipe.seed)
    text = BatchWindows(source, 0, windows, boundary(recipe.documents, shards.end_of_text))
    return Held(name, shards, train, text, rows=max(1, min(recipe.micro_batch, 4096 // recipe.context)))
