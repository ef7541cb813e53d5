"""The data of a run, text or a generated task: batches to learn from, windows to be judged by, checked before the first step."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from amor.data.generated import Generated
from amor.data.loader import Batches
from amor.data.shards import Shards, splits
from amor.data.tasks.base import read_task
from amor.errors import AmorError
from amor.train.distributed import World
from amor.train.recipe import Recipe

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True)
class TrainingData:
    """Batches to learn from and windows to be judged by."""

    train: Batches | Generated
    valid: Batches | Generated | None
    end_of_text: int | None  # None: a row is a document
    tokenizer: "Tokenizer | None"  # None: tokens that stand for no text

    @classmethod
    def open(cls, recipe: Recipe, world: World) -> "TrainingData":
        """Everything that can be wrong with the data is found here, before the first step."""
        if recipe.task:
            return cls.made(recipe, world)
        if not recipe.data:
            raise AmorError("the recipe names no data; give --data FOLDER, written by `amor prepare`")
        shards, judged = splits(recipe.data)
        judged = judged if recipe.eval.every else None
        for split in (shards, judged):
            if split is None:
                continue
            split.check(vocab=recipe.config().vocab)
            if recipe.verify and world.is_main:
                split.verify()
        valid = None if judged is None else _windows(judged, recipe, world)
        return cls(Batches(shards, recipe.context, recipe.batch, recipe.seed), valid, shards.end_of_text, shards.tokenizer())

    @classmethod
    def made(cls, recipe: Recipe, world: World) -> "TrainingData":
        """Of a task: nothing is read, and as many rows as are asked for are watched."""
        task, valid = read_task(recipe.task), None
        if recipe.eval.every:
            rows = max(recipe.eval.windows // world.size, 1) * world.size
            valid = Generated(task, rows, recipe.seed, "valid")
        return cls(Generated(task, recipe.batch, recipe.seed), valid, None, None)


def fingerprint(recipe: Recipe) -> str:
    """Of what a recipe would learn from, step by step; no token is read."""
    if recipe.task:
        return Generated(read_task(recipe.task), recipe.batch, recipe.seed).fingerprint
    return Batches(splits(recipe.data)[0], recipe.context, recipe.batch, recipe.seed).fingerprint


def _windows(judged: Shards, recipe: Recipe, world: World) -> Batches:
    """What a run is judged by: as many windows as asked for, or as there are, the same number for every rank."""
    windows = min(recipe.eval.windows, (judged.tokens - 1) // recipe.context) // world.size * world.size
    if not windows:
        raise AmorError(
            f"{judged.folder} holds {judged.tokens:,} tokens, less than a window of {recipe.context:,} + 1 for each of "
            f"{world.size} ranks; hold out more text, or leave validation away with --set eval.every=0"
        )
    return Batches(judged, recipe.context, windows, recipe.seed)
