"""The data of a run, text or a generated task: training batches and validation windows, checked
before the first step.
"""

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
    """Training batches, and one batch of validation windows (None: no evaluation)."""

    train: Batches | Generated
    valid: Batches | Generated | None
    end_of_text: int | None  # the token that ends a document; None: a row is a document
    tokenizer: "Tokenizer | None"  # None: a task, whose tokens are not text

    @classmethod
    def open(cls, recipe: Recipe, world: World) -> "TrainingData":
        """Open and check the data of a recipe; whatever is wrong with it is an error here."""
        if recipe.task:
            rows = max(recipe.eval.windows // world.size, 1) * world.size  # a multiple of the ranks
            unseen = Generated(read_task(recipe.task), rows, recipe.seed, "valid")
            return cls(training_batches(recipe), unseen if recipe.eval.every else None, None, None)
        if not recipe.data:
            raise AmorError(
                "the recipe names no data; give --data FOLDER, written by `amor prepare`"
            )
        shards, judged = splits(recipe.data)
        judged = judged if recipe.eval.every else None
        for split in filter(None, (shards, judged)):
            split.check(vocab=recipe.config().vocab)
            if recipe.verify and world.is_main:
                split.verify()
        valid = None if judged is None else _windows(judged, recipe, world)
        return cls(
            Batches(shards, recipe.context, recipe.batch, recipe.seed),
            valid,
            shards.end_of_text,
            shards.tokenizer(),
        )


def training_batches(recipe: Recipe) -> Batches | Generated:
    """The training batches of a recipe; no token is read."""
    if recipe.task:
        return Generated(read_task(recipe.task), recipe.batch, recipe.seed)
    return Batches(splits(recipe.data)[0], recipe.context, recipe.batch, recipe.seed)


def _windows(judged: Shards, recipe: Recipe, world: World) -> Batches:
    """The validation windows: eval.windows, or all there are; the same number for every rank."""
    windows = (
        min(recipe.eval.windows, (judged.tokens - 1) // recipe.context) // world.size * world.size
    )
    if not windows:
        raise AmorError(
            f"{judged.folder} holds {judged.tokens:,} tokens, "
            f"less than a window of {recipe.context:,} + 1 for each of "
            f"{world.size} ranks; hold out more text, "
            "or leave validation away with --set eval.every=0"
        )
    return Batches(judged, recipe.context, windows, recipe.seed)
