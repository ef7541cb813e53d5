"""A study becomes a list of runs: every row with each value of the axes, each learning rate and
each seed.

A run is what `amor train` would be called with. Everything that can be wrong is found here, before
anything is trained.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from amor import typed
from amor.data.shards import splits
from amor.errors import AmorError, nearest
from amor.files import folder_to_write, replace_file
from amor.run import Run
from amor.study.definition import (
    LEDGER,
    MOST_RUNS,
    PlannedRun,
    Study,
    StudyLedger,
    find_measure,
)
from amor.study.results import Results
from amor.train import recipe as recipes
from amor.train.checkpoint import read_training
from amor.train.data import training_batches
from amor.train.recipe import Recipe
from amor.train.resume import FREE, differences, recipe_of

HOME = recipes.HOME / "studies"
# a run may go on with others of these, but its numbers would be no match for those of its study
MATTERS = frozenset({"precision", "micro_batch", "eval"})


@dataclass(frozen=True)
class StudyPlan:
    """A study, where it is kept, and its runs."""

    ledger: StudyLedger
    folder: Path

    @property
    def study(self) -> Study:
        """The study that is planned."""
        return self.ledger.study

    @property
    def runs(self) -> tuple[PlannedRun, ...]:
        """Every run, in the order of the file."""
        return self.ledger.runs

    @property
    def results(self) -> Results:
        """Its folder, read as far as it is measured."""
        return Results(self.ledger, self.folder)

    def run(self, planned: PlannedRun) -> Run:
        """The run directory of a planned run."""
        return Run(self.folder / planned.folder)

    def recipe(self, planned: PlannedRun) -> Recipe:
        """The recipe of a planned run."""
        return recipe_for(planned, self.ledger.data)


def find(given: str | Path) -> Path:
    """A study by path, or by its name in amor/recipes/studies."""
    for path in (Path(given), Path(f"{given}.toml"), HOME / f"{given}.toml"):
        with suppress(OSError):  # a name that no file can have
            if path.is_file():
                return path
    raise AmorError(f"no study {str(given)!r}; {nearest(str(given), names())}")


def names() -> list[str]:
    """The studies of amor/recipes/studies."""
    return sorted(path.stem for path in HOME.glob("*.toml"))


def read(
    path: Path,
    changes: Iterable[str] = (),
    steps: int | None = None,
    seeds: tuple[int, ...] | None = None,
) -> Study:
    """A study from its file, with what a command line changes in all of its recipes."""
    study = typed.convert(Study, typed.extended(path), str(path))
    over = typed.assignments(changes, "lr.warmup=10")
    over |= {} if steps is None else {"steps": steps, "tokens": 0}
    tree = typed.tree(study)
    tree["set"] = typed.flat(study.set) | over
    tree["seeds"] = tree["seeds"] if seeds is None else seeds
    return typed.convert(Study, tree, str(path))


def plan(study: Study, name: str, data: str | None, folder: str | Path) -> StudyPlan:
    """Every run, checked: its recipe is sound and its model can be made, and no two are one."""
    where = _opened(data) if data else ""
    runs = tuple(_runs(study))
    if len(runs) > MOST_RUNS:
        raise AmorError(f"{name}: {len(runs):,} runs, more than {MOST_RUNS:,}")
    seen: dict[str, PlannedRun] = {}
    measured, checked = study.measurements(), []
    for run in runs:
        if (other := seen.setdefault(run.folder, run)) is not run:
            both = f"two runs would lie in {run.folder}: {other.row!r} and {run.row!r}"
            raise AmorError(f"{name}: {both}; name them apart")
        recipe = recipe_for(run, where)
        recipe.config()
        if not recipe.data and not recipe.task:
            hint = "give --data FOLDER, written by `amor prepare`"
            raise AmorError(f"{name}: {run.row} reads text; {hint}")
        if study.lr and not recipe.eval.every:
            lack = "lr is chosen by the validation loss, and eval.every is 0; make it 1 or more"
            raise AmorError(f"{name}: {run.row}: {lack}")
        for kind, options in measured.items():
            find_measure(kind).check(options, recipe)
        checked.append(replace(run, steps=recipe.total_steps))
    ledger = StudyLedger(name=name, study=study, data=where, runs=tuple(checked))
    return StudyPlan(ledger, Path(folder))


def check_folder(plan: StudyPlan) -> None:
    """A folder that holds runs of other recipes or of another text is refused."""
    for planned in plan.runs:
        run = plan.run(planned)
        if not run.used:
            continue
        recipe, instead = plan.recipe(planned), "give another --out, or delete that run"
        for key, (was, now) in differences(recipe_of(run), recipe, set(FREE) - MATTERS).items():
            trained = f"was trained with {key} = {was!r}, not {now!r}"
            raise AmorError(f"{run.folder} {trained}; {instead}")
        newest = run.folder / "latest"
        if newest.exists() and read_training(newest).data != training_batches(recipe).fingerprint:
            trained = f"was trained on other data than {recipe.data or 'its task makes now'}"
            raise AmorError(f"{run.folder} {trained}; {instead}")


def begin(plan: StudyPlan) -> None:
    """Write down what is run."""
    folder_to_write(plan.folder)
    replace_file(plan.folder / LEDGER, typed.text(plan.ledger))


def recipe_for(planned: PlannedRun, data: str) -> Recipe:
    """The recipe of a planned run, reading `data`; errors name its row."""
    try:
        return recipes.load(planned.recipe, planned.changes, **({"data": data} if data else {}))
    except AmorError as error:
        raise AmorError(f"{planned.row}: {error}") from None


def _runs(study: Study) -> Iterator[PlannedRun]:
    """Rows in the order of the file; of each the learning rates, and of these the seeds."""
    axes = itertools.product(*study.axes.values())
    points = [dict(zip(study.axes, values, strict=True)) for values in axes]
    for compared, axis in itertools.product(study.runs, points):
        row = ", ".join([compared.name, *(f"{key} = {value}" for key, value in axis.items())])
        slug = re.sub(r"[^\w.=-]+", "-", row).strip("-.") or "run"
        model = {} if compared.model is None else {"model.name": compared.model}
        # dotted keys of the recipe, the later ones winning
        keys = typed.flat(study.set) | model | typed.flat(compared.set) | axis
        recipe = keys.pop("recipe", None) or compared.recipe or study.recipe
        for lr, seed in itertools.product(study.lr or (None,), study.seeds):
            mine = keys | ({} if lr is None else {"lr.peak": lr}) | {"seed": seed}
            yield PlannedRun(
                row=row,
                folder="/".join(["runs", slug, *([f"lr-{lr:g}"] if lr else []), f"seed-{seed}"]),
                seed=seed,
                lr=lr,
                recipe=recipe,
                changes=tuple(f"{key}={_toml(key, value)}" for key, value in mine.items()),
                steps=0,
            )


def _toml(key: str, value: Any) -> str:
    """A value as `--set` takes it: of numbers, texts and lists of them JSON and TOML are the
    same."""
    try:
        if not isinstance(value, Mapping) and value is not None:
            return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        pass
    raise AmorError(f"{key}: {value!r} is no number, text, true, false or list of them")


def _opened(data: str) -> str:
    """The folder of prepared data, whose held-out split is there."""
    if splits(data)[1] is None:
        lack = "holds no valid/, and a study judges on held-out text"
        raise AmorError(f"{data} {lack}; prepare it again with --valid 0.05")
    return str(Path(data).resolve())
